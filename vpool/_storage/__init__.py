"""Storage layer: where memory comes from."""
