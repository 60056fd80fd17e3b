"""Differences between the supported versions of megatron-core (0.16.1 to 0.19), in one place."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def only_known(make: Callable[..., T], optional: dict[str, Any], **required: Any) -> T:
    """Call `make` with `required`, and with those of `optional` that this version has.

    For options whose absence changes nothing but speed or a default that is the same.
    """
    if dataclasses.is_dataclass(make):
        known = {field.name for field in dataclasses.fields(make) if field.init}
    else:
        known = set(inspect.signature(make).parameters)
    return make(**required, **{name: optional[name] for name in optional if name in known})
