"""Accuracy and loss between models: on the line through two of them, or the plane through three."""
