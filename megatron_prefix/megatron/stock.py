"""Megatron's own forward-backward function, whatever stands in its place in Megatron's modules.

The only file that imports it: `megatron_prefix.auto` puts the prefix schedule there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.pipeline_parallel import schedules


def stock_schedule(*args: Any, **options: Any) -> Callable[..., Any]:
    """What Megatron's `get_forward_backward_func` returns for these arguments."""
    function = schedules.get_forward_backward_func
    return getattr(function, "stock", function)(*args, **options)


def stock_arguments() -> frozenset[str]:
    """Names that Megatron's `get_forward_backward_func` takes, in the releases that are supported
    and in the one that is running; `schedule_pg_collection` is from 0.19."""
    function = inspect.unwrap(schedules.get_forward_backward_func)
    running = inspect.signature(function).parameters.values()
    names = (name.name for name in running if name.kind is not name.VAR_KEYWORD)
    return frozenset({"pp_size", "vp_size", "schedule_pg_collection", *names})
