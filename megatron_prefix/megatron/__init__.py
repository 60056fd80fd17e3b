"""Which Megatron versions and features run (features.py), and the hooks on a model (install.py)."""
