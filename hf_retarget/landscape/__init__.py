"""Accuracy and loss between models: over the line through two of them, or the plane through three."""
