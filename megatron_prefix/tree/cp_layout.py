"""Which positions a context-parallel rank holds, and which keys its queries see.  Pure.

A span of n positions is cut into 2*size pieces, and rank r holds pieces r and 2*size-1-r (zig-zag).
Under a causal mask every rank then has the same work. An all-gather returns the ranks' pieces end
to end: the *view*. It is not in the order of positions; attention without a mask does not need that
("The Llama 3 Herd of Models", section 3.3.2: the same pieces and the same all-gather).

Everything here takes plain numbers, so it is tested without processes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]


class PairedBlocks(NamedTuple):
    """Dense blocks, one a span: the span's `queries` see all of the span's `keys`.

    Attributes:
        queries: indices into the rank's positions.
        keys: indices into the view.
        query_lengths: number of queries of each span.
        key_lengths: number of keys of each span.
    """

    queries: Index
    keys: Index
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]


class OwnBlocks(NamedTuple):
    """What the queries of a rank see of their own segment.

    Attributes:
        pieces: lengths of the rank's pieces; each sees itself causally.
        paired: earlier pieces of the same span that they see whole: at most two sets.
    """

    pieces: tuple[int, ...]
    paired: tuple[PairedBlocks, ...]


def positions(length: int, rank: int, size: int) -> Index:
    """Positions that a rank holds of a span of `length`, ascending.

    Raises:
        ValueError: `length` is no multiple of 2*size.
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


def order(lengths: Sequence[int], size: int) -> Index:
    """Where the segment's positions are in the view: `view[order]` is the segment."""
    view = np.concatenate([held_positions(lengths, rank, size) for rank in range(size)])
    found = np.empty_like(view)
    found[view] = np.arange(len(view))
    return found


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


@functools.lru_cache(maxsize=1024)
def own_blocks(lengths: tuple[int, ...], rank: int, size: int) -> OwnBlocks:
    """A segment's own attention on one rank, for spans of these (whole) lengths.

    Both of the rank's pieces see all pieces before the first one; the second also sees those from
    the first one up to itself. So every rank computes 2*size-1 pairs of pieces a span, and two
    causal blocks.
    """
    in_order = order(lengths, size)
    starts = np.cumsum([0, *lengths])[:-1]
    pieces = [_piece(length, size) for length in lengths]
    local = np.cumsum([0, *(2 * piece for piece in pieces)])
    late = [start + piece + np.arange(piece) for start, piece in zip(local, pieces, strict=False)]
    paired = []
    for queries, first, stop in (
        ([np.arange(local[-1])], 0, rank),
        (late, rank, 2 * size - 1 - rank),
    ):
        if first == stop:
            continue
        seen = [
            in_order[start + first * piece : start + stop * piece]
            for start, piece in zip(starts, pieces, strict=True)
        ]
        per_span = 1 if queries is late else 2
        paired.append(
            PairedBlocks(
                np.concatenate(queries),
                np.concatenate(seen),
                tuple(per_span * piece for piece in pieces),
                tuple(len(keys) for keys in seen),
            )
        )
    return OwnBlocks(tuple(piece for piece in pieces for _ in range(2)), tuple(paired))


def _piece(length: int, size: int) -> int:
    if length % (2 * size):
        raise ValueError(
            f"a span of {length} positions cannot be cut into 2*{size} pieces: pad it to a multiple"
            f" of {2 * size}"
        )
    return length // (2 * size)
