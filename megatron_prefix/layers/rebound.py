"""A method of an instance with other objects behind some of its module's names."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


def rebound(method: Any, **names: Any) -> Callable[..., Any]:
    """The same method, on the same instance, that finds `names` instead of its module's.

    Megatron's recurrent layers call their kernels by global names. So one layer can be given
    others: its code runs as it is, and no other layer sees them.

    Args:
        method: bound, and written in Python.
    """
    function = method.__func__
    found = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__,
        function.__defaults__, function.__closure__,
    )  # fmt: skip
    found.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(found, method.__self__)
