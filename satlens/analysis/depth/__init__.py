"""Routes over depth: unfolding them, pairing them, their tables."""
