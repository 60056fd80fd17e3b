"""Functions that scale losses; Megatron's schedules call them for each microbatch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

NAMES = ("grad_scale_func", "moe_grad_scale_func", "mtp_grad_scale_func")
"""Fields of Megatron's configuration; the second and third are there since 0.18."""
_LIBRARY = ("megatron.core.", "megatron.training.")


def own_scale_functions(config: Any) -> tuple[Callable[..., Any], ...]:
    """Those that are the trainer's own, and so may say something else for every microbatch; what
    Megatron's optimizers say is the same throughout a step."""
    functions = (getattr(config, name, None) for name in NAMES)
    return tuple(
        function for function in functions if function is not None and not _is_megatrons(function)
    )


def _is_megatrons(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return (getattr(function, "__module__", None) or "").startswith(_LIBRARY)
