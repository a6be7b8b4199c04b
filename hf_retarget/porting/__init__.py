"""The port: load, trace, match, transplant, reset BatchNorm, compare with the alternatives, save."""
