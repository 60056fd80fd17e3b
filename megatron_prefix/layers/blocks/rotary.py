"""Rotary tables of the positions of a segment's tokens, from all rotary modules of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Rotary:
    """Tables of the rotary embeddings of a model chunk; equal modules share one.

    Megatron calls such a module for a whole sequence. A segment gets the rows of its positions from
    a table of angles [positions, 1, 1, width].

    Attributes:
        tables: by id of the module, with the scale of sine and cosine.
        placed: maps a table's name and rows to the memory that they are read from; None: as is.
    """

    def __init__(self) -> None:
        self.modules: list[Any] = []
        self._made_of: list[Any] = []
        self.tables: dict[int, tuple[Tensor, float]] = {}
        self.placed: Callable[[int, Tensor], Tensor] | None = None
        self.changes = 0
        self._names: dict[int, int] = {}
        self._length = 0
        self._at: Tensor | None = None
        self._rows: dict[int, Tensor] = {}

    def add(self, module: nn.Module) -> None:
        self.modules.append(module)
        self._made_of = []

    def prepare(self, max_position: int) -> None:
        """Before a step: makes the tables if they are too short or a module has changed."""
        current = [_made_of(module) for module in self.modules]
        if self._length > max_position and current == self._made_of:
            return
        self.changes += current != self._made_of
        self._length = 1 << max_position.bit_length()
        self.tables, self._at = {}, None
        for number, module in enumerate(self.modules):
            earlier = self.modules[:number]
            like = next((other for other in earlier if _equal(other, module)), module)
            self._names[id(module)] = id(like)
            # Not `forward`, which caches per class and slices by context-parallel rank.
            made = self.tables.get(id(like)) or module.get_emb(self._length)
            self.tables[id(module)] = made if isinstance(made, tuple) else (made, 1.0)
        # Megatron's modules move their numbers to the device when they are called first.
        self._made_of = [_made_of(module) for module in self.modules]

    def of(self, module: nn.Module, positions: Tensor) -> tuple[Tensor, float]:
        """Angles [positions, 1, 1, width] at int64 positions, and the scale of their sine and
        cosine ("YaRN: Efficient Context Window Extension of Large Language Models", 3.4)."""
        name, (_, scale) = self._names[id(module)], self.tables[id(module)]
        rows = self.rows(name, positions)
        return (rows if self.placed is None else self.placed(name, rows)), scale

    def rows(self, name: int, positions: Tensor) -> Tensor:
        if positions is not self._at:
            self._at, self._rows = positions, {}
        if name not in self._rows:
            self._rows[name] = self.tables[name][0].index_select(0, positions)
        return self._rows[name]


def _made_of(module: nn.Module) -> list[Any]:
    """The numbers of a rotary embedding, with the versions of its tensors: equal if unchanged."""
    return [
        (name, id(value), value._version) if isinstance(value, Tensor) else (name, value)
        for name, value in _values(module).items()
    ]


def _equal(first: nn.Module, second: nn.Module) -> bool:
    numbers, theirs = _values(first), _values(second)
    same = type(first) is type(second) and numbers.keys() == theirs.keys()
    return same and all(_equal_values(value, theirs[name]) for name, value in numbers.items())


def _values(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, Tensor | int | float)
    }


def _equal_values(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.device == second.device and torch.equal(first, second)
    return bool(type(first) is type(second) and first == second)
