"""megatron_prefix: a Megatron-Core schedule that runs the prompt a group shares once, exactly."""

__version__ = "0.1.0"
