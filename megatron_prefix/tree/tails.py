"""What queries with a window see of their ancestors: the last positions before their span.  Pure.

Every inner span keeps its last `window` positions for its children. A shorter span keeps all, and
its children also read the last positions of its parent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_prefix.tree.forest import Place, Segment


class Tail(NamedTuple):
    """Window keys that a segment reads.

    Attributes:
        visible: the inner segments that it reads of, ascending.
        rows: disjoint intervals of the arena.
        spans: per span the intervals of its keys among these rows, in the order of positions.
    """

    visible: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]
    spans: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def repeated(self) -> int:
        """Rows summed over spans; shared rows count once per span."""
        return sum(stop - start for span in self.spans for start, stop in span)


def tails_of(
    segments: Sequence[Segment], intervals: Sequence[slice | None], window: int
) -> Iterator[Tail]:
    """Window keys of every segment.

    Args:
        intervals: per segment its rows in the arena, span after span; None for a wave.
        window: positions before its own that a query sees, at least 1.
    """
    ends: dict[Place, int] = {}
    for index, interval in enumerate(intervals):
        end = interval.start if interval else 0
        for number, span in enumerate(segments[index].spans if interval else ()):
            end += min(window, span.padded)
            ends[Place(index, number)] = end
    for segment in segments:
        reaches = [_reach(segments, span.parent, window) for span in segment.spans]
        most: dict[Place, int] = {}
        for reach in reaches:
            for place, num in reach:
                most[place] = max(num, most.get(place, 0))
        stops, total = {}, 0
        for place, num in most.items():
            stops[place] = total = total + num
        yield Tail(
            tuple(sorted({place.segment for place in most})),
            tuple((ends[place] - num, ends[place]) for place, num in most.items()),
            tuple(tuple((stops[at] - num, stops[at]) for at, num in reach) for reach in reaches),
        )


def _reach(
    segments: Sequence[Segment], place: Place | None, window: int
) -> list[tuple[Place, int]]:
    """Ancestors that a window reaches, the nearest last, with the number of positions of each."""
    reached = []
    while place is not None and window > 0:
        span = segments[place.segment].spans[place.number]
        num = min(window, span.padded)
        reached.append((place, num))
        place, window = span.parent, window - num
    return reached[::-1]
