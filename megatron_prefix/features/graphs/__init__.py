"""CUDA graphs of what layers run before and behind their cores."""
