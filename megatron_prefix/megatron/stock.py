"""Megatron's own forward-backward function, whatever stands in its place in Megatron's modules.

The only file that imports it: `megatron_prefix.auto` puts the prefix schedule there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.pipeline_parallel import schedules


def stock_schedule(*args: Any, **options: Any) -> Callable[..., Any]:
    """What Megatron's `get_forward_backward_func` returns for these arguments."""
    function = schedules.get_forward_backward_func
    return getattr(function, "stock", function)(*args, **options)
