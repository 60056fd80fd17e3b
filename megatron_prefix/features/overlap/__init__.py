"""Reductions of gradients that begin during the last backwards."""
