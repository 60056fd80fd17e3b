"""Rotary tables of the positions of a segment's tokens, whichever module of a model makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Rotary:
    """Tables of the rotary embeddings of a model chunk; equal modules have one in common.

    Megatron calls such a module for a whole sequence. A segment's positions are others, so it gets
    rows of a table [positions, 1, 1, width] of its angles.

    Attributes:
        modules: as they were added.
        tables: of each by its id, with the scale of sine and cosine.
        placed: takes a table's name and rows, and gives where these are read; None: where they
            are.
        changes: how often the modules were found to have changed.
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
        """Adds a module, before the next `prepare`."""
        self.modules.append(module)
        self._made_of = []

    def prepare(self, max_position: int) -> None:
        """Begins a step: makes the tables long enough, and again where a module was changed."""
        known = [_made_of(module) for module in self.modules]
        if self._length > max_position and known == self._made_of:
            return
        self.changes += known != self._made_of
        self._length = 1 << max_position.bit_length()
        self.tables, self._at = {}, None
        for number, module in enumerate(self.modules):
            like = next((one for one in self.modules[:number] if _equal(one, module)), None)
            # Not `forward`: that is cached for the whole class and slices by context-parallel rank.
            made = None if like is None else self.tables[id(like)]
            self._names[id(module)] = id(module if like is None else like)
            self.tables[id(module)] = made or _table(module.get_emb(self._length))
        # Megatron's modules move their numbers to the device when they are called first.
        self._made_of = [_made_of(module) for module in self.modules]

    def of(self, module: nn.Module, positions: Tensor) -> tuple[Tensor, float]:
        """Angles [positions, 1, 1, width] of some positions (int64), and the scale of their sine
        and cosine ("YaRN: Efficient Context Window Extension of Large Language Models", 3.4)."""
        name, (_, scale) = self._names[id(module)], self.tables[id(module)]
        rows = self.rows(name, positions)
        return (rows if self.placed is None else self.placed(name, rows)), scale

    def rows(self, name: int, positions: Tensor) -> Tensor:
        """Rows of a table [positions, 1, 1, width]."""
        if positions is not self._at:
            self._at, self._rows = positions, {}
        if name not in self._rows:
            self._rows[name] = self.tables[name][0].index_select(0, positions)
        return self._rows[name]


def _table(found: Tensor | tuple[Tensor, float]) -> tuple[Tensor, float]:
    return found if isinstance(found, tuple) else (found, 1.0)


def _made_of(module: nn.Module) -> list[Any]:
    """What tells that a rotary embedding was changed: its numbers, and writes to its tensors."""
    return [
        (name, id(value), value._version) if isinstance(value, Tensor) else (name, value)
        for name, value in _numbers(module).items()
    ]


def _equal(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules make the same table."""
    mine, theirs = _numbers(one), _numbers(other)
    same = type(one) is type(other) and mine.keys() == theirs.keys()
    return same and all(_same(value, theirs[name]) for name, value in mine.items())


def _numbers(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, Tensor | int | float)
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.device == other.device and torch.equal(one, other)
    return bool(type(one) is type(other) and one == other)
