"""Where the states of inner spans lie in a recurrent layer's arena.  Pure.

What a span leaves in a recurrent layer has one size, however long the span is: its state behind the
last position, and the last inputs of a convolution. So a row of the arena is a span, not a
position, and a span reads one row: that of its parent. Row 0 is the state before any position, all
zero, and the parent of spans without one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron_prefix.tree.forest import Segment


class StateMap(NamedTuple):
    """Rows of one model chunk's recurrent layers.

    Attributes:
        length: rows of the arena.
        intervals: per segment its spans' rows; None for a wave.
        parents: per segment and span the row that the span begins with.
        seen: per segment the inner segments with these rows, ascending.
    """

    length: int
    intervals: tuple[slice | None, ...]
    parents: tuple[tuple[int, ...], ...]
    seen: tuple[tuple[int, ...], ...]


NO_STATES = StateMap(1, (), (), ())


def state_map(segments: Sequence[Segment], program: Iterable[tuple[str, int]]) -> StateMap:
    """Plans the rows; those of a segment are used again after its backward.

    Args:
        segments: the step's, in F-order.
        program: ("F" or "B", segment) in the order in which the rank runs them.
    """
    placed: dict[int, slice] = {}
    live: set[int] = set()
    length = 1
    for kind, index in program:
        if not segments[index].inner:
            continue
        if kind == "F":
            start = _gap([placed[other] for other in live], len(segments[index].spans))
            placed[index] = slice(start, start + len(segments[index].spans))
            length = max(length, placed[index].stop)
            live.add(index)
        else:
            live.discard(index)
    above = [[span.parent for span in segment.spans] for segment in segments]
    parents = tuple(
        tuple(placed[p.segment].start + p.number if p else 0 for p in places) for places in above
    )
    seen = tuple(tuple(sorted({p.segment for p in places if p})) for places in above)
    intervals = tuple(placed.get(index) for index in range(len(segments)))
    return StateMap(length, intervals, parents, seen)


def batches(lengths: Sequence[int]) -> list[list[int]]:
    """Numbers of spans in batches whose lengths differ by less than a factor of two."""
    order = sorted(range(len(lengths)), key=lambda number: lengths[number].bit_length())
    groups = itertools.groupby(order, key=lambda number: lengths[number].bit_length())
    return [[*numbers] for _, numbers in groups]


def _gap(taken: Iterable[slice], size: int) -> int:
    """The first row behind row 0 from which `size` rows are free."""
    start = 1
    for rows in sorted(taken, key=lambda rows: rows.start):
        if rows.start - start >= size:
            break
        start = max(start, rows.stop)
    return start
