"""Evaluation: loading weights, resetting BatchNorm statistics, scoring and comparing models."""
