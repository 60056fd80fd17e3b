"""Which Megatron versions and features run, and the one file that hooks a model."""
