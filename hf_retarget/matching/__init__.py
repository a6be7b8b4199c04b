"""Matching: finding the permutation that best maps gradients, weights or deltas onto others."""
