"""Which positions a context-parallel rank holds, and which keys its queries see.  Pure.

A span of n positions is cut into 2*size pieces, and rank r holds pieces r and 2*size-1-r (zig-zag).
Under a causal mask every rank then has the same work. An all-gather returns the ranks' pieces end
to end: the *view*. It is not in the order of positions; attention without a mask does not need that
("The Llama 3 Herd of Models", section 3.3.2: the same pieces and the same all-gather).

That is how segments are cut, and model calls, sample by sample. A trainer may say that it cuts its
calls otherwise (`Slices`); then they are refused.

Everything here takes plain numbers, so it is tested without processes.
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
    """Each sample by itself, as a span: Megatron's own."""
    CONTIGUOUS = 1
    """Each row, a pack as a whole, into one part a rank, wherever its samples end."""


class OwnRuns(NamedTuple):
    """What the queries of a rank see of their own segment: two runs a span on several ranks.

    The queries of a run are one piece of the span, and its keys are the span from its begin to the
    end of that piece, so the mask is causal and ends with the last query and the last key.

    Attributes:
        queries: queries of every run, in the order of the rank's positions.
        keys: keys of every run.
        seen: the keys as positions of the segment, run after run; some are in two runs.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    seen: Index


def positions(length: int, rank: int, size: int) -> Index:
    """Positions that a rank holds of a span of `length`, ascending.

    Raises:
        ValueError: `length` is not a multiple of 2*size.
    """
    if size == 1:
        return np.arange(length)
    piece = _piece(length, size)
    first = np.arange(piece)
    return np.concatenate([first + rank * piece, first + (2 * size - 1 - rank) * piece])


def held_positions(lengths: Sequence[int], rank: int, size: int) -> Index:
    """Positions that a rank holds of a segment with spans of these lengths, each cut by itself."""
    starts = np.cumsum([0, *lengths])[:-1]
    held = [positions(n, rank, size) + start for n, start in zip(lengths, starts, strict=True)]
    return np.concatenate(held) if held else np.zeros(0, np.int64)


def dealt(lengths: Sequence[int], size: int) -> Index:
    """The segment's positions in the order of the view: `segment[dealt]` is the view."""
    return np.concatenate([held_positions(lengths, rank, size) for rank in range(size)])


def order(lengths: Sequence[int], size: int) -> Index:
    """Where the segment's positions are in the view: `view[order]` is the segment."""
    view = dealt(lengths, size)
    places_of = np.empty_like(view)
    places_of[view] = np.arange(len(view))
    return places_of


def runs_in_view(lengths: Sequence[int], size: int) -> Index:
    """Where runs of keys of these (whole) lengths, equally shared, are in the view: run by run.

    In the view the first rank's parts of all runs come first, then the second rank's.
    """
    local = [length // size for length in lengths]
    starts, total = np.cumsum([0, *local]), sum(local)
    pieces = [
        np.arange(num) + start + rank * total
        for start, num in zip(starts, local, strict=False)
        for rank in range(size)
    ]
    return np.concatenate(pieces)


def own_runs(lengths: tuple[int, ...], rank: int, size: int) -> OwnRuns:
    """A segment's own attention on one rank, for spans of these (whole) lengths.

    A rank's early piece sees few pieces and its late one many, so that every rank computes 2*size-1
    pairs of pieces a span, and two causal blocks. A single rank has one run a span.
    """
    if size == 1:
        return OwnRuns(lengths, lengths, np.arange(sum(lengths)))
    queries: list[int] = []
    keys: list[int] = []
    seen = []
    for start, length in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False):
        for begin, end in pieces(length, rank, size):
            queries.append(end - begin)
            keys.append(end)
            seen.append(start + np.arange(end))
    return OwnRuns(tuple(queries), tuple(keys), np.concatenate(seen))


def pieces(length: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Begin and end of the consecutive positions that a rank holds of a span, ascending."""
    if size == 1:
        return [(0, length)]
    piece = _piece(length, size)
    return [(at * piece, (at + 1) * piece) for at in (rank, 2 * size - 1 - rank)]


def last_positions(
    lengths: Sequence[int], last: Sequence[int], rank: int, size: int
) -> tuple[Index, Index]:
    """The last positions of spans that a rank holds: where each is among its own positions, and
    among the last ones of all spans.

    Args:
        lengths: of the spans, whole.
        last: of each span how many at its end are asked for.
        rank: its number.
        size: number of ranks.
    """
    mine, places, begin, at = [], [], 0, 0
    for length, num in zip(lengths, last, strict=True):
        held = positions(length, rank, size) - (length - num)
        found = np.flatnonzero(held >= 0)
        mine.append(found + begin)
        places.append(held[found] + at)
        begin, at = begin + length // size, at + num
    return np.concatenate(mine), np.concatenate(places)


def own_sums(lengths: tuple[int, ...], rank: int, size: int) -> Index:
    """Which keys of a rank's own runs lie at every place of the view, [2, places]; -1 for none.

    A key is in the run of the rank's late piece, in both runs, or in none.
    """
    runs = own_runs(lengths, rank, size)
    places = order(lengths, size)[runs.seen]
    late = np.repeat(np.arange(len(runs.keys)) % 2 == 1, runs.keys)
    key_at = np.full((2, sum(lengths)), -1, np.int64)
    keys = np.arange(len(places))
    for number, mine in enumerate((late, ~late)):
        key_at[number, places[mine]] = keys[mine]
    return key_at


def _piece(length: int, size: int) -> int:
    if length % (2 * size):
        raise ValueError(
            f"a span of {length} positions cannot be cut into 2*{size} pieces: pad it to a multiple"
            f" of {2 * size}"
        )
    return length // (2 * size)
