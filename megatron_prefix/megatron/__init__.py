"""Which Megatron versions and features run (features.py), the hooks on a model (install.py),
and Megatron's own schedule (stock.py)."""
