"""[pure] Where a trainer's own dealing stays, one line of the log says why."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from megatron_prefix.features.dealing.microbatches import OwnDealing

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


def wrapped(owner: Any, name: str, parameters: str, wrapper: Callable[..., Any]) -> None:
    """Puts `wrapper(stock)` in the place of a function, if it takes what it is known to take.

    Args:
        owner: a module or a class.
        name: of the function.
        parameters: the names of its arguments, with commas between them.
        wrapper: makes what takes its place.
    """
    stock = getattr(owner, name, None)
    taken = ", ".join(inspect.signature(stock).parameters) if callable(stock) else "nothing"
    if taken == parameters:
        setattr(owner, name, wrapper(stock))
    else:
        stays(f"{getattr(owner, '__module__', owner.__name__)}.{name}", f"it takes {taken}")


def or_own(trainer: str, deals: Callable[[], Result], own: Result) -> Result:
    """What `deals` returns, or the trainer's own result where it raises an error: data of a form
    that nobody has seen must not end a run."""
    try:
        return deals()
    except OwnDealing as error:
        stays(trainer, str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, the trainer can go on
        stays(trainer, f"{type(error).__name__}: {error}")
    return own


@functools.cache
def stays(trainer: str, why: str) -> None:
    """Logs once that the trainer's own dealing stays."""
    logger.warning("megatron_prefix: %s deals as ever, not whole groups: %s", trainer, why)
