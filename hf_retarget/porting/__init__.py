"""The port: load, trace, match, transplant, reset BatchNorm, compare with what a user would do instead, save."""
