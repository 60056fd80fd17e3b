"""Which rows a context-parallel rank holds, and what its queries see of their own segment.  Pure.

A row of n positions is cut into 2*size chunks, and rank r holds chunks r and 2*size-1-r.  Under a
causal mask every rank then has the same work, and the ranks' slices, laid end to end, are what an
all-gather returns: the *view*.  It is not in the order of the positions, which attention without a
mask does not ask for ("The Llama 3 Herd of Models", section 3.3.2, context parallelism: the same
chunks and the same all-gather).

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
    """Dense blocks, one a row: the row's `queries` see all of the row's `keys`.

    Attributes:
        queries: of the rank's own rows.
        keys: of the view's rows.
        query_lengths: number of queries of each row.
        key_lengths: number of keys of each row.
    """

    queries: Index
    keys: Index
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]


class OwnBlocks(NamedTuple):
    """What the queries of a rank see of the segment they belong to.

    Attributes:
        chunks: lengths of the rank's chunks; each sees itself causally.
        paired: chunks that come earlier in the same row: at most two kinds.
    """

    chunks: tuple[int, ...]
    paired: tuple[PairedBlocks, ...]


def positions(length: int, rank: int, size: int) -> Index:
    """Positions that a rank holds of a row of `length`, ascending.

    Raises:
        ValueError: 2*size chunks do not divide the row.
    """
    if size == 1:
        return np.arange(length)
    chunk = _chunk(length, size)
    first = np.arange(chunk)
    return np.concatenate([first + rank * chunk, first + (2 * size - 1 - rank) * chunk])


def segment_rows(lengths: Sequence[int], rank: int, size: int) -> Index:
    """Rows that a rank holds of a segment whose rows have these lengths, each cut by itself."""
    starts = np.cumsum([0, *lengths])[:-1]
    held = [positions(n, rank, size) + start for n, start in zip(lengths, starts, strict=True)]
    return np.concatenate(held) if held else np.zeros(0, np.int64)


def order(lengths: Sequence[int], size: int) -> Index:
    """Rows of the view in the order of the segment: `view[order]` is the segment."""
    view = np.concatenate([segment_rows(lengths, rank, size) for rank in range(size)])
    found = np.empty_like(view)
    found[view] = np.arange(len(view))
    return found


@functools.lru_cache(maxsize=1024)
def own_blocks(lengths: tuple[int, ...], rank: int, size: int) -> OwnBlocks:
    """A segment's own attention on one rank, for rows of these (whole) lengths.

    Both of the rank's chunks see the chunks in front of the first one, and the second also sees
    those from the first one on: on every rank 2*size-1 pairs of chunks a row, and two causal ones.
    """
    in_order = order(lengths, size)
    starts = np.cumsum([0, *lengths])[:-1]
    chunks = [_chunk(length, size) for length in lengths]
    local = np.cumsum([0, *(2 * chunk for chunk in chunks)])
    late = [start + chunk + np.arange(chunk) for start, chunk in zip(local, chunks, strict=False)]
    paired = []
    for queries, first, stop in (
        ([np.arange(local[-1])], 0, rank),
        (late, rank, 2 * size - 1 - rank),
    ):
        if first == stop:
            continue
        seen = [
            in_order[start + first * chunk : start + stop * chunk]
            for start, chunk in zip(starts, chunks, strict=True)
        ]
        per_row = 1 if queries is late else 2
        paired.append(
            PairedBlocks(
                np.concatenate(queries),
                np.concatenate(seen),
                tuple(per_row * chunk for chunk in chunks),
                tuple(len(keys) for keys in seen),
            )
        )
    return OwnBlocks(tuple(chunk for chunk in chunks for _ in range(2)), tuple(paired))


def _chunk(length: int, size: int) -> int:
    if length % (2 * size):
        raise ValueError(
            f"a row of {length} positions is not cut into 2*{size} chunks: pad it to a multiple of"
            f" {2 * size}"
        )
    return length // (2 * size)
