"""Several finished ports beside each other."""
