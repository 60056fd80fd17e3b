"""Layers with several residual streams."""
