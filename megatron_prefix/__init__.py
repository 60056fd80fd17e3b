"""megatron_prefix: a Megatron-Core schedule that runs the prompt a group shares once, exactly."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
# Imported at first use: the pure modules and half of the command line do without torch.
_LAZY = {
    "PrefixConfig": "megatron_prefix.config",
    "PrefixSchedule": "megatron_prefix.run.schedule",
    "get_forward_backward_func": "megatron_prefix.run.schedule",
}
__all__ = ["__version__", *sorted(_LAZY)]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
