"""What segments see of inner segments, wherever that lies in an arena, and how much at once.  Pure.

A step has one of these for all ranks and model chunks: only where rows lie depends on a rank's
program (payload_map.py).
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron_prefix.tree.forest import Place, Segment, Span

_FIRST = operator.itemgetter(0)
PIECE_KEYS = 1 << 15
"""Most keys of a single run in one level. In one piece a long block would need memory for all its
gradients beside their sums."""


class View(NamedTuple):
    """Queries [first, stop) of a segment see a span of an inner segment."""

    first: int
    stop: int
    place: Place


class Views(NamedTuple):
    """What a segment sees.

    Attributes:
        levels: by the number of ancestors above the span that is seen, in the order of queries.
        common: so many ancestors are seen by all queries.
    """

    levels: tuple[tuple[View, ...], ...]
    common: int

    @property
    def segments(self) -> set[int]:
        return {view.place.segment for level in self.levels for view in level}


@functools.lru_cache(maxsize=4)
def views_of(segments: tuple[Segment, ...], parts: int) -> tuple[Views, ...]:
    """What every segment sees of others and of itself, wherever that lies; the queries of one of
    `parts` context-parallel ranks."""
    depth: dict[Place, int] = {}
    views = []
    for index, segment in enumerate(segments):
        for number, span in enumerate(segment.spans if segment.inner else ()):
            depth[Place(index, number)] = depth[span.parent] + 1 if span.parent else 0
        views.append(_views(segments, index, depth, parts))
    return tuple(views)


def _views(
    segments: Sequence[Segment], index: int, depth: Mapping[Place, int], parts: int
) -> Views:
    """Goes from span to span, and leaves and enters what only one of two neighbours sees."""
    levels: list[list[View]] = []
    path: list[tuple[int, Place]] = []  # what is seen, with the first query that sees it
    end, spans = 0, segments[index].spans

    def leave(length: int) -> None:
        while len(path) > length:
            first, place = path.pop()
            levels[len(path)].append(View(first, end, place))

    for parent, siblings in itertools.groupby(zip(_parents(spans), spans, strict=True), _FIRST):
        place, new = parent, []
        while place and not (depth[place] < len(path) and path[depth[place]][1] == place):
            new.append(place)
            place = segments[place.segment].spans[place.number].parent
        leave(depth[place] + 1 if place else 0)
        path += [(end, place) for place in reversed(new)]
        levels += [[] for _ in range(len(path) - len(levels))]
        end += sum(span.padded // parts for _, span in siblings)
    leave(0)
    common = itertools.takewhile(lambda level: level[0][:2] == (0, end), levels)
    return Views(tuple(map(tuple, levels)), len([*common]))


def _parents(spans: Sequence[Span]) -> Iterator[Place | None]:
    """Of each span. Padding sees what is before it sees, so that it needs no run of its own: nobody
    reads what it gives, and no gradient comes to it."""
    parent = None
    for span in spans:
        parent = span.parent if span.rollouts else parent
        yield parent


class LevelKeys:
    """How many keys segments read in their levels (payload_map.py), in arenas of `shares`.

    Attributes:
        total: per segment, in all levels.
    """

    def __init__(self, segments: Sequence[Segment], views: Sequence[Views], shares: int) -> None:
        self._segments, self._longest = segments, PIECE_KEYS if shares == 1 else math.inf
        self._sizes = {
            Place(index, number): span.padded // shares
            for index, segment in enumerate(segments)
            for number, span in enumerate(segment.spans if segment.inner else ())
        }
        sizes = [
            [[self._sizes[view.place] for view in level] for level in seen.levels] for seen in views
        ]
        self.total = [sum(map(sum, levels)) for levels in sizes]
        # What only some queries see is one level for each number of ancestors above it.
        self._apart = [
            max((self._piece(level) for level in levels[seen.common :]), default=0)
            for levels, seen in zip(sizes, views, strict=True)
        ]
        self._common = [
            seen.levels[seen.common - 1][0].place if seen.common else None for seen in views
        ]

    def _piece(self, level: Sequence[int]) -> float:
        return sum(level) if len(level) > 1 else min(level[0], self._longest)

    def most(self, intervals: Sequence[slice | None]) -> list[float]:
        """Per segment, in its longest level; `intervals`: rows of inner segments. What all queries
        see is one block as far as it is neighbours."""
        blocks: dict[Place, tuple[int, int, int]] = {}  # its end, its rows, and of all above it
        for place, size in self._sizes.items():
            rows, parent = intervals[place.segment], self._span(place).parent
            if rows is None:
                continue
            start = (
                blocks[place._replace(number=place.number - 1)][0] if place.number else rows.start
            )
            end, length, longest = blocks[parent] if parent else (-1, 0, 0)
            length = length + size if end == start else size
            blocks[place] = start + size, length, max(length, longest)
        return [
            max(apart, min(blocks[place][2], self._longest) if place else 0)
            for apart, place in zip(self._apart, self._common, strict=True)
        ]

    def _span(self, place: Place) -> Span:
        return self._segments[place.segment].spans[place.number]
