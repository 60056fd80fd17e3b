"""The trainer's data iterators, and what forward steps draw from them: told, or drawn twice.

An iterator may be anything. Those of slime and miles have no `__next__`: they count what was drawn
in an attribute.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import (
    _pytree as pytree,  # torch's own; torch.utils.pytree is not public before 2.9
)

from megatron_prefix.errors import named, refused
from megatron_prefix.refusals.table import OTHER_DRAWS
from megatron_prefix.run.read.random_numbers import HostGenerators


def wrapped(data_iterator: Any, wrap: Callable[[Any], Any]) -> Any:
    """A data iterator, or each of a list of one per model chunk, wrapped."""
    if isinstance(data_iterator, list):
        return [wrap(iterator) for iterator in data_iterator]
    return wrap(data_iterator)


class ObservedIterator:
    """A data iterator that tells what `next` draws from it."""

    def __init__(self, iterator: Iterator[Any], drew: Callable[[Any], None]) -> None:
        self._iterator, self._drew = iterator, drew

    def __iter__(self) -> ObservedIterator:
        return self

    def __next__(self) -> Any:
        item = next(self._iterator)
        self._drew(item)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def observed(data_iterator: Any, drew: Callable[[Any], None]) -> Any:
    """Data iterators as `ObservedIterator`; those without `__next__` stay as they are."""

    def wrap(iterator: Any) -> Any:
        return ObservedIterator(iterator, drew) if hasattr(iterator, "__next__") else iterator

    return wrapped(data_iterator, wrap)


def single(items: list[Any]) -> Any:
    """The item of a list; None if there are none or several."""
    return items[0] if len(items) == 1 else None


class RepeatedIterators:
    """The data iterators of one call, from which forward steps can draw the same twice.

    Args:
        data_iterator: the trainer's: one, or a list with one per model chunk; it may be anything.
        copies: forward steps draw deep copies first, tensors cloned, and the trainer's own items
            the second time. Without, they draw its own items both times, and must not write to
            tensors in them.

    Attributes:
        first: what forward steps are to be given first.
        problem: why the same cannot be drawn again; "" if it can. Only where there are copies.
    """

    def __init__(self, data_iterator: Any, *, copies: bool = False) -> None:
        self._data_iterator, self._copies, self.problem = data_iterator, copies, ""
        self._sources: dict[int, _Items | _Attributes] = {}  # chunks may share one
        self.first = wrapped(data_iterator, lambda iterator: self._source(iterator).first)

    def again(self) -> Any:
        """What forward steps are to be given then: all that was drawn, and then the rest.

        Raises:
            UserError: a tensor that was drawn has been written to.
        """
        for source in self._sources.values():
            source.rewind()
        return wrapped(self._data_iterator, lambda iterator: self._source(iterator).again)

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
        self._sources.clear()  # a circle, in which batches would wait for the collector
        self.first = None

    def copied(self, value: Any) -> Any:
        """What is drawn first: a deep copy; where there can be none the value, and `problem` is
        set."""
        if not self._copies:
            return value
        try:
            return copy.deepcopy(value)
        except Exception as error:  # noqa: BLE001  # whatever a trainer's class raises
            self.problem = f"{type(value).__name__} cannot be copied ({named(error)})"
            return value

    def _source(self, iterator: Any) -> _Items | _Attributes:
        if id(iterator) not in self._sources:
            kind = _Items if hasattr(iterator, "__next__") else _Attributes
            self._sources[id(iterator)] = kind(iterator, self)
        return self._sources[id(iterator)]


class _Item(NamedTuple):
    value: Any
    versions: list[tuple[Tensor, int]]
    moves: list[Callable[[], None]]


class _Items:
    """An iterator that keeps what is drawn, and gives it once more; it is what is drawn from."""

    def __init__(self, iterator: Iterator[Any], owner: RepeatedIterators) -> None:
        self._iterator, self._owner = iterator, owner
        self._items: deque[_Item] = deque()
        self._is_rewound, self._generators = False, HostGenerators()

    @property
    def first(self) -> _Items:
        return self

    again = first

    def __iter__(self) -> _Items:
        return self

    def __next__(self) -> Any:
        if self._is_rewound:
            return self._drawn() if self._items else next(self._iterator)
        self._generators.moved()  # what the forward step has drawn is not the iterator's
        item = next(self._iterator)
        # A forward step may take things out of a dict that it draws.
        value = copy.copy(item) if isinstance(item, dict | list) else item
        self._items.append(_Item(value, _tensor_versions(item), self._generators.moved()))
        return self._owner.copied(item)

    def _drawn(self) -> Any:
        """What was drawn; random numbers of the host are as they were behind it."""
        item = self._items.popleft()
        for move in item.moves:
            move()
        return item.value

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._iterator, name)
        if callable(value):  # it may draw, too, and nothing would know what
            self._owner.problem = f"the data iterator is asked for {name}"
        return value

    def close(self) -> None:
        """Keeps nothing more; nothing of the trainer's has been changed."""
        self._items.clear()

    def rewind(self) -> None:
        if any(tensor._version != old for item in self._items for tensor, old in item.versions):
            raise refused(OTHER_DRAWS, "write into tensors that they have drawn")
        self._is_rewound = True


class _Attributes:
    """An object without `__next__`: it is copied, or its attributes are put back. Iterators among
    these keep what is drawn, until the call is over."""

    def __init__(self, iterator: Any, owner: RepeatedIterators) -> None:
        self.again = iterator
        self.first = owner.copied(iterator)
        self._attributes: dict[str, Any] = dict(getattr(iterator, "__dict__", {}))
        inside = () if self.first is not iterator or owner.problem else self._attributes.items()
        self._iterators = {name: value for name, value in inside if _is_plain_iterator(value)}
        self._items = {name: _Items(value, owner) for name, value in self._iterators.items()}
        if self._items:
            vars(iterator).update(self._items)

    def rewind(self) -> None:
        if self._attributes:
            vars(self.again).update(self._attributes | self._items)
        for items in self._items.values():
            items.rewind()

    def close(self) -> None:
        for name, items in self._items.items():
            members = vars(self.again)
            if members.get(name) is items:
                members[name] = self._iterators[name]
            items.close()


def _is_plain_iterator(value: Any) -> bool:
    """Whether a value is a generator or another of Python's own, of which nothing is asked but the
    next item."""
    return hasattr(value, "__next__") and type(value).__module__ in ("builtins", "itertools")


def _tensor_versions(item: Any) -> list[tuple[Tensor, int]]:
    leaves = (leaf for leaf in pytree.tree_leaves(item) if isinstance(leaf, Tensor))
    return [(leaf, leaf._version) for leaf in leaves if not leaf.is_inference()]
