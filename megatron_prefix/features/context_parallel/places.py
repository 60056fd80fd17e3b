"""Places of keys in what context-parallel ranks exchange (tree/cp_layout.py), int64.  Pure.

Lengths are of a segment's spans, or of runs, on all ranks together; a view is what an exchange
returns: the first rank's positions, then the second's.
"""

from __future__ import annotations

import numpy as np

from megatron_prefix.tree import cp_layout
from megatron_prefix.tree.cp_layout import Index


def view_positions(lengths: tuple[int, ...], rank: int, size: int) -> Index:
    """Positions of the segment in the order of the view."""
    return cp_layout.view_positions(lengths, size)


def own_in_order(lengths: tuple[int, ...], rank: int, size: int) -> Index:
    """Of a rank's own runs in the segment."""
    return cp_layout.own_runs(lengths, rank, size).visible


def own(lengths: tuple[int, ...], rank: int, size: int) -> Index:
    """Of a rank's own runs in the view."""
    return cp_layout.view_order(lengths, size)[own_in_order(lengths, rank, size)]


def runs_in_view(lengths: tuple[int, ...], rank: int, size: int) -> Index:
    """Places in the view of runs of keys of these (whole) lengths, run by run. Every rank has an
    equal part of each run, and the view is the first rank's parts of all runs, then the second's.
    """
    local = [length // size for length in lengths]
    starts, total = np.cumsum([0, *local]), sum(local)
    pieces = [
        np.arange(num) + start + part * total
        for start, num in zip(starts, local, strict=False)
        for part in range(size)
    ]
    return np.concatenate(pieces)


def own_sums(lengths: tuple[int, ...], rank: int, size: int) -> Index:
    """Keys of a rank's own runs at every place of the view, [2, places]; -1: none.

    A key is in the run of the rank's late piece, in both runs, or in none.
    """
    runs = cp_layout.own_runs(lengths, rank, size)
    places = own(lengths, rank, size)
    late = np.repeat(np.arange(len(runs.keys)) % 2 == 1, runs.keys)
    key_at = np.full((2, sum(lengths)), -1, np.int64)
    keys = np.arange(len(places))
    for number, selected in enumerate((late, ~late)):
        key_at[number, places[selected]] = keys[selected]
    return key_at
