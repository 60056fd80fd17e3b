"""Which positions a context-parallel rank holds, and which keys its queries see.  Pure.

A span of n positions is cut into 2*size pieces, and rank r holds pieces r and 2*size-1-r (zig-zag).
Under a causal mask every rank then has the same work. An all-gather returns the ranks' pieces end
to end: the *view*. It is not in the order of positions; attention without a mask does not need that
("The Llama 3 Herd of Models", section 3.3.2: the same pieces and the same all-gather).

Segments are cut so, and each sample of a model call, unless its trainer says otherwise (`Slices`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]


class Slices(IntEnum):
    """How a trainer's model calls are cut for context-parallel ranks."""

    ZIGZAG = 0
    """Megatron's own: each sample is cut into 2 * cp pieces, and rank r has pieces r and
    2 * cp - 1 - r."""
    CONTIGUOUS = 1
    """Each row, also a pack, is cut into one part for each rank, wherever its samples end (slime's
    `--allgather-cp`). Layers must be made for it."""


class OwnRuns(NamedTuple):
    """What the queries of a rank see of their own segment: two runs a span on several ranks.

    A run's queries are one piece of the span, its keys the span up to the end of that piece: the
    mask is causal from the bottom right.

    Attributes:
        visible: the keys as positions of the segment, run after run; some are in two runs.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    visible: Index


def rank_positions(length: int, rank: int, size: int) -> Index:
    """Positions that a rank holds of a span of `length`, ascending.

    Raises:
        ValueError: `length` is not a multiple of 2*size.
    """
    return np.concatenate([np.arange(*bounds) for bounds in pieces(length, rank, size)])


def held_positions(lengths: Sequence[int], rank: int, size: int) -> Index:
    """Positions that a rank holds of a segment with spans of these lengths, each cut by itself."""
    starts = np.cumsum([0, *lengths])[:-1]
    held = [rank_positions(n, rank, size) + at for n, at in zip(lengths, starts, strict=True)]
    return np.concatenate(held) if held else np.zeros(0, np.int64)


def contiguous_positions(lengths: Sequence[int], rank: int, size: int) -> Index:
    """Positions that a rank holds of rows of these lengths, each cut into one part for each."""
    starts = np.cumsum([0, *lengths])[:-1] + [length // size * rank for length in lengths]
    return np.concatenate([s + np.arange(n // size) for s, n in zip(starts, lengths, strict=True)])


def view_positions(lengths: Sequence[int], size: int) -> Index:
    """The segment's positions in the order of the view: `segment[view_positions]` is the view."""
    return np.concatenate([held_positions(lengths, rank, size) for rank in range(size)])


def view_order(lengths: Sequence[int], size: int) -> Index:
    """Where the segment's positions are in the view: `view[view_order]` is the segment."""
    return inverse(view_positions(lengths, size))


def inverse(places: Index) -> Index:
    """The inverse of a permutation, in linear time."""
    order = np.empty_like(places)
    order[places] = np.arange(len(places))
    return order


def own_runs(lengths: tuple[int, ...], rank: int, size: int) -> OwnRuns:
    """A segment's own attention on one rank, for spans of these (whole) lengths.

    A rank's early piece sees few pieces and its late one many, so that every rank computes 2*size-1
    pairs of pieces a span, and two causal blocks. A single rank has one run a span.
    """
    if size == 1:
        return OwnRuns(lengths, lengths, np.arange(sum(lengths)))
    queries: list[int] = []
    keys: list[int] = []
    visible = []
    for start, length in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False):
        for begin, end in pieces(length, rank, size):
            queries.append(end - begin)
            keys.append(end)
            visible.append(start + np.arange(end))
    return OwnRuns(tuple(queries), tuple(keys), np.concatenate(visible))


def pieces(length: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Bounds of the pieces that a rank holds of a span, ascending."""
    if size == 1:
        return [(0, length)]
    if length % (2 * size):
        raise ValueError(
            f"a span of {length} positions cannot be cut into 2*{size} pieces: pad it to a multiple"
            f" of {2 * size}"
        )
    piece = length // (2 * size)
    return [(at * piece, (at + 1) * piece) for at in (rank, 2 * size - 1 - rank)]
