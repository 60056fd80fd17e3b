"""Where inner segments' payloads lie in a layer's arena, and which rows others read.  Pure.

What a span leaves for its children in a layer is its payload. A layer of a model chunk has one
*arena*: rows for all inner segments that wait for their backward. An inner segment is one interval
of rows, planned from the rank's program: free again after its backward. There are three forms:

- **positions**: a row a position (K and V). A segment of a single span lies right behind the
  segment that it continues, if that is possible, so a chain of chunks is one block of keys to all
  that hangs below it. A segment's queries see their ancestors in a few *levels*. A level is one
  call of a kernel: runs of queries, each with an interval of keys and no mask. A segment's own keys
  are its causal block and have no entry here. ("DualKV", section 3, is the case of one dense and
  one causal block.)
- **the last positions**: a row for each of the last ones of a span (K and V where attention has a
  window), on every context-parallel rank. A segment reads those that its queries reach
  (tree/tails.py).
- **spans**: a row a span, however long it is (the state behind its last position). A span reads one
  row: its parent's. Row 0 is the state before any position, all zero, and the parent of spans
  without one.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from megatron_prefix.tree.forest import Place, Segment, Span
from megatron_prefix.tree.tails import Tail, tails_of

_FIRST = operator.itemgetter(0)
PIECE_KEYS = 1 << 15
"""Most keys of a single run in one level. In one piece a long block would need memory for all its
gradients beside their sums."""


class Run(NamedTuple):
    """Queries [first, stop) of a segment see the keys [start, end) of the arena."""

    first: int
    stop: int
    start: int
    end: int


class Level(NamedTuple):
    """One or more runs of one call of a kernel, in the order of their queries; their keys do not
    overlap."""

    runs: tuple[Run, ...]

    @property
    def queries(self) -> tuple[int, ...]:
        return tuple(run.stop - run.first for run in self.runs)

    @property
    def keys(self) -> tuple[int, ...]:
        return tuple(run.end - run.start for run in self.runs)

    @property
    def rows(self) -> slice | None:
        """The keys as one interval of the arena; None if they are not, in the runs' order."""
        return one_interval([(run.start, run.end) for run in self.runs])


def one_interval(intervals: Sequence[tuple[int, int]]) -> slice | None:
    """Intervals as one, if each begins at the end of the one before it; else None."""
    if all(before[1] == after[0] for before, after in itertools.pairwise(intervals)):
        return slice(intervals[0][0], intervals[-1][1])
    return None


@dataclass(frozen=True)
class Form:
    """What a row of a payload belongs to.

    Attributes:
        name: "positions" or "spans".
        last: of positions: only so many at the end of a span have one, and every context-parallel
            rank has those of all; None: all positions.
    """

    name: str
    last: int | None = None

    POSITIONS: ClassVar[Form]
    SPANS: ClassVar[Form]

    def rows(self, padded: int, parts: int = 1) -> int:
        """Rows of a span on one rank.

        Args:
            padded: its positions on all ranks.
            parts: context-parallel ranks that have as many of them.
        """
        if self.name == "spans":
            return 1
        return padded // parts if self.last is None else min(padded, self.last)


Form.POSITIONS, Form.SPANS = Form("positions"), Form("spans")


@dataclass(frozen=True)
class RowMap:
    """Rows of one form of payload.

    Attributes:
        intervals: per segment its rows; None for a wave.
        visible: per segment the inner segments whose rows it reads, ascending.
        zeros: rows at the front that are always zero.
    """

    length: int
    intervals: tuple[slice | None, ...]
    visible: tuple[tuple[int, ...], ...]
    zeros: int = 0


@dataclass(frozen=True)
class PayloadMap:
    """Where payloads lie on one rank, for one model chunk.

    Attributes:
        levels: per segment what its queries see of their ancestors' positions, root first.
        parents: per segment and span the row of `spans` that the span begins with.
        lengths: per segment the lengths of its spans on all ranks, padding included.
        parts: context-parallel ranks, which hold equal parts of the queries.
        shares: of how many equal parts of every segment's positions an arena holds one.
        tails: rows of payloads of last positions by their form, and what each segment reads there.
    """

    positions: RowMap
    spans: RowMap
    levels: tuple[tuple[Level, ...], ...]
    parents: tuple[tuple[int, ...], ...]
    lengths: tuple[tuple[int, ...], ...]
    parts: int = 1
    shares: int = 1
    tails: Mapping[Form, tuple[RowMap, tuple[Tail, ...]]] = field(default_factory=dict)

    def visible(self, index: int) -> set[int]:
        """The segments whose payloads, of any form, a segment reads."""
        return {*self.positions.visible[index], *self.spans.visible[index]}

    def rows(self, form: Form) -> RowMap:
        if form.last is not None:
            return self.tails[form][0]
        return self.positions if form == Form.POSITIONS else self.spans


def payload_map(
    segments: Sequence[Segment],
    program: Sequence[tuple[str, int]] | None = None,
    parts: int = 1,
    shares: int | None = None,
    forms: Iterable[Form] = (),
) -> PayloadMap:
    """Plans the arenas of one model chunk.

    Args:
        segments: the step's, in F-order.
        program: ("F" or "B", segment) in the order in which the rank runs them; default: all
            forwards first, so that every segment has rows of its own.
        parts: context-parallel ranks, which hold equal parts of every segment; the queries are
            those of one rank.
        shares: into how many equal parts positions are cut, of which an arena has one: `parts`
            (default), or 1 if every rank has all of them.
        forms: of its layers' payloads; those of all positions and of spans are always planned.
    """
    shares = parts if shares is None else shares
    if program is None:
        program = [("F", index) for index in range(len(segments))]
    lines = [_line_parent(segments, index) for index in range(len(segments))]
    sizes = [segment.padded_length // shares for segment in segments]
    positions = _Allocator(segments, sizes, lines, program)
    below = _Levels(segments, positions.intervals, parts, shares)
    no_lines: list[int | None] = [None] * len(segments)
    counts = [len(segment.spans) for segment in segments]
    spans = _Allocator(segments, counts, no_lines, program, zeros=1)
    parents = [[span.parent for span in segment.spans] for segment in segments]
    rows = tuple(
        tuple(spans.placed[place.segment].start + place.number if place else 0 for place in places)
        for places in parents
    )
    tails = {}
    for form in {form for form in forms if form.last is not None}:
        sizes = [sum(form.rows(span.padded) for span in segment.spans) for segment in segments]
        last = _Allocator(segments, sizes, no_lines, program)
        reads = tuple(tails_of(segments, last.intervals, form.last or 0))
        visible = tuple(read.visible for read in reads)
        tails[form] = RowMap(last.length, last.intervals, visible), reads
    lengths = tuple(tuple(span.padded for span in segment.spans) for segment in segments)
    return PayloadMap(
        RowMap(positions.length, positions.intervals, tuple(map(tuple, below.visible))),
        RowMap(spans.length, spans.intervals, tuple(s.parents for s in segments), spans.zeros),
        below.levels, rows, lengths, parts, shares, tails,
    )  # fmt: skip


def length_batches(lengths: Sequence[int]) -> list[list[int]]:
    """Numbers of spans in batches whose lengths differ by less than a factor of two."""
    order = sorted(range(len(lengths)), key=lambda number: lengths[number].bit_length())
    groups = itertools.groupby(order, key=lambda number: lengths[number].bit_length())
    return [[*numbers] for _, numbers in groups]


class _Allocator:
    """Gives rows to inner segments at their forward and frees them at their backward.

    Args:
        lines: per segment the one directly behind which it should lie; None: anywhere.
        program: ("F" or "B", segment) in order.
        zeros: reserved rows at the front.

    Attributes:
        placed: rows of every inner segment.
        intervals: rows of every segment; None for a wave.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        sizes: Sequence[int],
        lines: Sequence[int | None],
        program: Iterable[tuple[str, int]],
        zeros: int = 0,
    ) -> None:
        self.sizes, self.above, self.zeros = sizes, lines, zeros
        self.line = list(sizes)  # rows of the longest line of segments from this one down
        for index in reversed(range(len(segments))):
            parent = self.above[index]
            if parent is not None and segments[index].inner:
                rows = self.sizes[parent] + self.line[index]
                self.line[parent] = max(self.line[parent], rows)
        self.length = zeros
        self.placed: dict[int, slice] = {}
        self.reserved: dict[int, slice] = {}  # by the first segment of a line
        self.head: dict[int, int] = {}
        self.used: dict[int, set[int]] = {}  # by head, the segments in its reservation
        for kind, index in program:
            if segments[index].inner:
                self.take(index) if kind == "F" else self.free(index)
        self.intervals = tuple(self.placed.get(index) for index in range(len(segments)))

    def take(self, index: int) -> None:
        """Places a segment behind its parent if there is room, else at the first gap."""
        parent, size = self.above[index], self.sizes[index]
        if parent is not None and self._fits_behind(parent, size):
            self.head[index] = self.head[parent]
            start = self.placed[parent].stop
        else:
            start, rows = self.zeros, self.line[index]
            for reservation in sorted(
                self.reserved.values(), key=lambda reservation: reservation.start
            ):
                if reservation.start - start >= rows:
                    break
                start = max(start, reservation.stop)
            self.reserved[index] = slice(start, start + rows)
            self.length = max(self.length, start + rows)
            self.head[index], self.used[index] = index, set()
        self.used[self.head[index]].add(index)
        self.placed[index] = slice(start, start + size)

    def free(self, index: int) -> None:
        head = self.head[index]
        self.used[head].discard(index)
        if head == index:
            del self.reserved[index]

    def _fits_behind(self, parent: int, size: int) -> bool:
        head, start = self.head[parent], self.placed[parent].stop
        occupied = (self.placed[member] for member in self.used[head])
        free = all(rows.stop <= start or rows.start >= start + size for rows in occupied)
        return free and start + size <= self.reserved[head].stop


def _line_parent(segments: Sequence[Segment], index: int) -> int | None:
    spans = [span for span in segments[index].spans if span.rollouts]
    parent = spans[0].parent if len(spans) == 1 else None
    return parent.segment if parent and len(segments[parent.segment].spans) == 1 else None


def _parents(spans: Sequence[Span]) -> Iterator[Place | None]:
    """Of each span. Padding sees what is before it sees, so that it needs no run of its own: nobody
    reads what it gives, and no gradient comes to it."""
    parent = None
    for span in spans:
        parent = span.parent if span.rollouts else parent
        yield parent


class _Levels:
    def __init__(
        self,
        segments: Sequence[Segment],
        intervals: Sequence[slice | None],
        parts: int,
        shares: int,
    ) -> None:
        self.segments, self.parts, self.shares = segments, parts, shares
        self.starts = [  # of every segment's spans in the arena
            [*itertools.accumulate((s.padded // shares for s in segment.spans), initial=rows.start)]
            if rows
            else []
            for segment, rows in zip(segments, intervals, strict=True)
        ]
        self.paths: dict[Place, tuple[Place, ...]] = {}
        self.visible: list[list[int]] = []
        self.levels = tuple([self._of(index) for index in range(len(segments))])

    def _of(self, index: int) -> tuple[Level, ...]:
        spans = self.segments[index].spans
        paths, bounds = list[tuple[Place, ...]](), [0]  # of neighbours that continue one span
        parents = _parents(spans)
        for parent, siblings in itertools.groupby(zip(parents, spans, strict=True), _FIRST):
            paths.append(self._path(parent))
            bounds.append(bounds[-1] + sum(span.padded // self.parts for _, span in siblings))
        above = {place.segment for path in paths for place in path}
        self.visible.append(sorted(above - {index}))
        alike = (len({*places}) == 1 for places in zip(*paths, strict=False))
        common = len([*itertools.takewhile(bool, alike)])  # ancestors that all spans have
        levels = list(self._shared(paths[0][:common], bounds[-1]))
        for depth in range(common, max(map(len, paths))):
            runs = []
            keyed = [path[depth] if depth < len(path) else None for path in paths]
            for visible, group in itertools.groupby(range(len(paths)), keyed.__getitem__):
                numbers = [*group]
                if visible is not None:
                    run = Run(bounds[numbers[0]], bounds[numbers[-1] + 1], *self._rows(visible))
                    runs.append(run)
            levels += self._pieces(runs[0]) if len(runs) == 1 else [Level(tuple(runs))]
        return tuple(levels)

    def _path(self, place: Place | None) -> tuple[Place, ...]:
        if place is None:
            return ()
        if place not in self.paths:
            span = self.segments[place.segment].spans[place.number]
            self.paths[place] = (*self._path(span.parent), place)
        return self.paths[place]

    def _rows(self, place: Place) -> tuple[int, int]:
        start, end = self.starts[place.segment][place.number : place.number + 2]
        return start, end

    def _shared(self, path: Sequence[Place], num_queries: int) -> Iterator[Level]:
        """Levels of the ancestors that all queries see: neighbours in the arena are one block."""
        rows = [self._rows(place) for place in path]
        for number, (start, end) in enumerate(rows):
            if number and rows[number - 1][1] == start:
                continue
            for _, following in itertools.takewhile(
                lambda pair: pair[0][1] == pair[1][0], itertools.pairwise(rows[number:])
            ):
                end = following[1]
            yield from self._pieces(Run(0, num_queries, start, end))

    def _pieces(self, run: Run) -> Iterator[Level]:
        """A single run as levels of at most PIECE_KEYS keys."""
        # Gathered keys of all ranks are sent back in one message, so they stay in one piece.
        longest = PIECE_KEYS if self.shares == 1 else run.end - run.start
        for first in range(run.start, run.end, longest):
            yield Level((run._replace(start=first, end=min(run.end, first + longest)),))
