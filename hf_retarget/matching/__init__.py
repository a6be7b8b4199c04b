"""Finding the permutation that best maps one stack of gradients, weights or deltas onto another."""
