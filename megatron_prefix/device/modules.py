"""The modules of models, as quickly as Python can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def modules_of(*models: Any) -> Iterator[Any]:
    """Every module of the models, once. `Module.modules()` makes names, which takes ten times as
    long: milliseconds before every step."""
    left, seen = list(models), set()
    while left:
        module = left.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            left += [one for one in module._modules.values() if one is not None]
