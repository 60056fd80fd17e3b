"""Kinds of layers, a file for each; attention's blocks and kernels below."""
