"""Attention with a sliding window: a kind of layer, and how its segments run."""
