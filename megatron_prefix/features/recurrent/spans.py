"""A segment's spans as recurrent layers need them: indices on the device, made once an action.

Layers run a segment as one row of positions. Only a few positions of every span need more than the
row: the first ones, whose convolution looks back into the parent, and the last ones, into which
that of children looks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.device.transfer import to_device
from megatron_prefix.sidecar.arena import Reading
from megatron_prefix.tree import cp_layout
from megatron_prefix.tree.payload_map import length_batches


class Edges(NamedTuple):
    """Positions near the ends of spans, for a convolution that looks back `before` positions.

    Attributes:
        first: the first `before` positions of every span, int64 [spans * before]; a shorter span
            repeats its last one.
        ends: `first`, then the same of the last positions; a shorter span repeats its first one.
        kept: where in `first` the first of those is that are the same, int64 [spans * before]; None
            if all differ.
        repeats: which of `first` are there already, bool or int64 [spans * before]; None if none.
        tail: where, in (parent's tail, first, last) of every span side by side, the inputs are that
            the span leaves, int64 [spans * before]; None if all of them are the last ones.
    """

    first: Tensor
    ends: Tensor
    kept: Tensor | None
    repeats: Tensor | None
    tail: Tensor | None


def edge_numbers(lengths: Sequence[int] | np.ndarray, before: int) -> tuple[np.ndarray, ...]:
    """Numbers of `Edges` [spans * before]: of the first positions and the last, of `kept`,
    `repeats` and `tail`. A span without positions repeats the first position of all, and leaves
    what it got."""
    sizes, offsets = np.asarray(lengths, np.int64)[:, None], np.arange(before)
    numbers, starts = np.arange(len(sizes))[:, None], np.cumsum(sizes, 0) - sizes
    inside, is_empty = np.minimum(offsets, sizes - 1), sizes == 0
    first = np.where(is_empty, 0, starts + inside)
    last = np.where(is_empty, 0, starts + np.maximum(sizes - before + offsets, 0))
    kept = np.where(is_empty, 0, before * numbers + inside)
    # A span shorter than `before` leaves what it got, moved by its length, then its own.
    of_sides = np.where(sizes >= before, 2 * before + offsets, sizes + offsets)
    tail = 3 * before * numbers + of_sides
    return tuple(map(np.ravel, (first, last, kept, offsets >= sizes, tail)))


def runs_of(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of neighbours with one parent its row, and how many they are."""
    grouped = [(row, len([*same])) for row, same in itertools.groupby(parents)]
    return [row for row, _ in grouped], [number for _, number in grouped]


class SpanBatch(NamedTuple):
    """Spans of similar length as rows of a batch, each behind some positions in front of it.

    Attributes:
        spans: the same, int64 [rows].
        positions: of the segment, int64 [rows * (in front + longest)]; any where `blank`.
        front: which of them are in front, int64 [rows * in front].
        padding: which of them are behind a shorter row's end, int64; None if none is.
    """

    numbers: tuple[int, ...]
    spans: Tensor
    positions: Tensor
    front: Tensor
    padding: Tensor | None
    blank: Tensor


class Spans:
    """The spans of one segment.

    Args:
        lengths: of all context-parallel ranks together, padding included.
        parents: row that each begins with (tree/payload_map.py).
    """

    def __init__(
        self, lengths: Sequence[int], parents: Sequence[int], device: torch.device
    ) -> None:
        self.lengths, self.parents, self._device = tuple(lengths), tuple(parents), device
        self._starts = [0, *itertools.accumulate(lengths)]
        self._edges: dict[int, Edges] = {}
        self._batches: dict[int, tuple[SpanBatch, ...]] = {}
        self._unbatched: dict[int, tuple[Tensor, Tensor]] = {}
        self._dealt: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def has_parents(self) -> bool:
        return any(self.parents)

    @property
    def is_one_root(self) -> bool:
        """Whether it is one span without a parent: then a row is right as it is."""
        return self.parents == (0,)

    @functools.cached_property
    def cu_seqlens(self) -> Tensor:
        """Where spans begin and end, int64 [spans + 1]; fla caches what it makes of this tensor."""
        return self._on(self._starts)

    @functools.cached_property
    def cu_seqlens_cpu(self) -> Tensor:
        return torch.tensor(self._starts)

    def run(
        self, rule: Callable[..., Any], arguments: Mapping[str, Any], takes_lengths: bool
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """What a rule makes of all spans, and the states behind them if it gives them; on the
        host `takes_lengths`."""
        lengths = {"cu_seqlens": self.cu_seqlens}
        if takes_lengths:
            lengths["cu_seqlens_cpu"] = self.cu_seqlens_cpu
        made: tuple[Tensor, Tensor | None] = rule(**{**arguments, **lengths})
        return made

    @functools.cached_property
    def reading(self) -> Reading:
        return Reading(self._on(self.parents))

    @functools.cached_property
    def runs(self) -> tuple[Tensor | None, Tensor]:
        """Neighbours with one parent: how many, None where each is alone, and its row, both int64
        [runs]."""
        rows, numbers = runs_of(self.parents)
        return None if max(numbers) == 1 else self._on(numbers), self._on(rows)

    def edges(self, before: int) -> Edges:
        if before not in self._edges:
            self._edges[before] = self._find_edges(before)
        return self._edges[before]

    def _find_edges(self, before: int) -> Edges:
        first, last, *numbers = edge_numbers(self.lengths, before)
        ends = self._on(np.concatenate([first, last]))
        if min(self.lengths) >= before:
            return Edges(ends[: len(first)], ends, None, None, None)
        return Edges(ends[: len(first)], ends, *map(self._on, numbers))

    @functools.cached_property
    def _numbers(self) -> list[list[int]]:
        return length_batches(self.lengths)

    def batches(self, before: int) -> tuple[SpanBatch, ...]:
        """All spans in batches whose lengths differ by less than a factor of two."""
        if before not in self._batches:
            self._batches[before] = tuple(
                self._batch(np.array(numbers), before) for numbers in self._numbers
            )
        return self._batches[before]

    def _batch(self, numbers: np.ndarray, before: int) -> SpanBatch:
        lengths, starts = (np.array(x)[numbers, None] for x in (self.lengths, self._starts[:-1]))
        offsets = np.arange(-before, lengths.max())
        positions = starts + np.clip(offsets, 0, lengths - 1)
        front = np.flatnonzero(np.broadcast_to(offsets < 0, positions.shape))
        padding = np.flatnonzero(offsets >= lengths)
        return SpanBatch(
            tuple(numbers.tolist()), self._on(numbers), self._on(positions.ravel()),
            self._on(front), self._on(padding) if len(padding) else None,
            self._on(np.concatenate([front, padding])),
        )  # fmt: skip

    @functools.cached_property
    def order(self) -> Tensor:
        """Where each span is among the rows of `batches`, int64 [spans]."""
        return self._on(np.argsort(np.concatenate(self._numbers)))

    def unbatched(self, before: int) -> tuple[Tensor, Tensor]:
        """Where the segment's positions are in the batches' rows end to end, int64, and where the
        positions in front of spans are, int64 [spans * before]."""
        if before not in self._unbatched:
            own, front, at = np.empty(self._starts[-1], np.int64), {}, 0
            for numbers in self._numbers:
                longest = max(self.lengths[number] for number in numbers)
                for number in numbers:
                    start, length = self._starts[number], self.lengths[number]
                    own[start : start + length] = at + before + np.arange(length)
                    front[number] = at + np.arange(before)
                    at += before + longest
            fronts = np.concatenate([front[number] for number in range(len(self))])
            self._unbatched[before] = self._on(own), self._on(fronts)
        return self._unbatched[before]

    def dealt(self, size: int) -> tuple[Tensor, Tensor]:
        """Where positions are among those of context-parallel ranks end to end, and the reverse.

        Args:
            size: ranks, each with two pieces of every span.
        """
        if size not in self._dealt:
            places = cp_layout.view_order, cp_layout.view_positions
            order, reverse = (self._on(place_of(self.lengths, size)) for place_of in places)
            self._dealt[size] = order, reverse
        return self._dealt[size]

    def _on(self, index: Sequence[int] | np.ndarray) -> Tensor:
        return to_device(self._device, np.asarray(index, np.int64))
