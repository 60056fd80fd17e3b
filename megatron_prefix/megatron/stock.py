"""Megatron's own forward-backward function, whatever stands in its place in Megatron's modules.

The only file that imports it: `megatron_prefix.auto` puts the prefix schedule there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.pipeline_parallel import schedules

from megatron_prefix.megatron.install import give_back


def stock_schedule(*args: Any, **options: Any) -> Callable[..., Any]:
    """What Megatron's `get_forward_backward_func` returns for these arguments."""
    function = schedules.get_forward_backward_func
    return getattr(function, "stock", function)(*args, **options)


def run_stock(arguments: Mapping[str, Any], **changes: Any) -> list[Any]:
    """Runs a call of Megatron's schedule; one with gradients needs all memory that is its own."""
    if not arguments.get("forward_only"):
        give_back(arguments["model"])
    store: list[Any] = stock_schedule()(**{**arguments, **changes})
    return store


def stock_arguments() -> frozenset[str]:
    """Names that Megatron's `get_forward_backward_func` takes, in the releases that are supported
    and in the one that is running; `schedule_pg_collection` is from 0.19."""
    names = _arguments_of(schedules.get_forward_backward_func)
    return names | {"pp_size", "vp_size", "schedule_pg_collection"}


def call_arguments() -> frozenset[str]:
    """Names that Megatron's three schedules take in the release that is running: the same from
    0.16 to 0.20, and perhaps more later or in a fork."""
    return _arguments_of(
        schedules.forward_backward_no_pipelining,
        schedules.forward_backward_pipelining_with_interleaving,
        schedules.forward_backward_pipelining_without_interleaving,
    )


@functools.lru_cache(maxsize=8)
def _arguments_of(*functions: Callable[..., Any]) -> frozenset[str]:
    return frozenset(
        argument.name
        for function in functions
        for argument in inspect.signature(inspect.unwrap(function)).parameters.values()
        if argument.kind is not argument.VAR_KEYWORD
    )
