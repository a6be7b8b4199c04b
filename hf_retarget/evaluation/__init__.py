"""How good a model is: weights into a model, BatchNorm statistics reset, scores on a split."""
