"""Sparse attention that a trainer brings itself: kinds of layers, and how their segments run."""
