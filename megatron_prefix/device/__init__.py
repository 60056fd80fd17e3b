"""Copies to and from the device, fused kernels, and the tolerance of its arithmetic."""
