"""What a step draws from the trainer's data iterators, for two schedules in a row.

The first schedule gets copies. The second gets what the trainer's iterators gave, untouched.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

from megatron_prefix.errors import named

logger = logging.getLogger(__name__)


class Draws:
    """The data iterators of one call of the schedule.

    Args:
        data_iterator: the trainer's: one, or a list with one per model chunk; it may be anything.

    Attributes:
        problem: why the same draws cannot be given again; "" if they can.
    """

    def __init__(self, data_iterator: Any) -> None:
        self._original = data_iterator
        self.problem = ""
        self._recorders: dict[int, _Recorder] = {}

    def first(self) -> Any:
        """What the first schedule draws from."""
        return self._each(self._recorded)

    def second(self) -> Any:
        """What the second schedule draws from: everything that was drawn, then the rest."""
        return self._each(self._repeated)

    def _each(self, made: Any) -> Any:
        if isinstance(self._original, list):
            return [made(iterator) for iterator in self._original]
        return made(self._original)

    def _recorded(self, iterator: Any) -> Any:
        if iterator is None:
            return None
        if hasattr(iterator, "__next__"):
            return self._recorders.setdefault(id(iterator), _Recorder(iterator, self))
        return self.copied(iterator)  # slime's and miles' keep their place in an attribute

    def _repeated(self, iterator: Any) -> Any:
        recorder = self._recorders.get(id(iterator))
        return iterator if recorder is None else _Repeater(iterator, recorder.items)

    def copied(self, value: Any) -> Any:
        """A deep copy, tensors cloned; where there can be none the value, and `problem` is set."""
        try:
            return copy.deepcopy(value)
        except Exception as error:  # noqa: BLE001  # whatever a trainer's class raises
            self.problem = f"{type(value).__name__} cannot be copied ({named(error)})"
            return value


class _Recorder:
    """An iterator that gives copies of what it draws, and keeps what it drew."""

    def __init__(self, iterator: Iterator[Any], draws: Draws) -> None:
        self._iterator, self._draws = iterator, draws
        self.items: list[Any] = []

    def __iter__(self) -> _Recorder:
        return self

    def __next__(self) -> Any:
        self.items.append(next(self._iterator))
        return self._draws.copied(self.items[-1])

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._iterator, name)
        if callable(value):  # it may draw, too, and nothing would know what
            self._draws.problem = f"the data iterator is asked for {name}"
        return value


class _Repeater:
    """An iterator that gives some items first."""

    def __init__(self, iterator: Iterator[Any], items: list[Any]) -> None:
        self._iterator, self._items = iterator, items

    def __iter__(self) -> _Repeater:
        return self

    def __next__(self) -> Any:
        return self._items.pop(0) if self._items else next(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)
