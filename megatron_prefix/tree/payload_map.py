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

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from megatron_prefix.tree.forest import Segment
from megatron_prefix.tree.tails import Tail, tails_of
from megatron_prefix.tree.views import PIECE_KEYS, View, Views, views_of


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
    arenas = Arenas(segments, shares)
    positions, spans = (arenas.allocated(form, program) for form in (Form.POSITIONS, Form.SPANS))
    views = views_of(tuple(segments), parts)
    starts = [  # of every segment's spans in the arena
        [*itertools.accumulate((s.padded // shares for s in segment.spans), initial=rows.start)]
        if rows
        else []
        for segment, rows in zip(segments, positions.intervals, strict=True)
    ]
    visible = tuple(tuple(sorted(seen.segments - {index})) for index, seen in enumerate(views))
    parents = [[span.parent for span in segment.spans] for segment in segments]
    rows = tuple(
        tuple(spans.placed[place.segment].start + place.number if place else 0 for place in places)
        for places in parents
    )
    tails = {}
    for form in {form for form in forms if form.last is not None}:
        last = arenas.allocated(form, program)
        reads = tuple(tails_of(segments, last.intervals, form.last or 0))
        tails[form] = RowMap(last.length, last.intervals, tuple(r.visible for r in reads)), reads
    lengths = tuple(tuple(span.padded for span in segment.spans) for segment in segments)
    return PayloadMap(
        RowMap(positions.length, positions.intervals, visible),
        RowMap(spans.length, spans.intervals, tuple(s.parents for s in segments), spans.zeros),
        tuple(map(_Levels(starts, shares).of, views)), rows, lengths, parts, shares, tails,
    )  # fmt: skip


def length_batches(lengths: Sequence[int]) -> list[list[int]]:
    """Numbers of spans in batches whose lengths differ by less than a factor of two."""
    order = sorted(range(len(lengths)), key=lambda number: lengths[number].bit_length())
    groups = itertools.groupby(order, key=lambda number: lengths[number].bit_length())
    return [[*numbers] for _, numbers in groups]


class Arenas:
    """Rows that segments take in the arenas of a step, for any program; see `payload_map`."""

    def __init__(self, segments: Sequence[Segment], shares: int) -> None:
        self._segments, self._shares = segments, shares
        self._sizes: dict[Form, tuple[list[int], list[int | None], list[int]]] = {}

    def allocated(self, form: Form, program: Iterable[tuple[str, int]]) -> _Allocator:
        """Rows of one form while a model chunk runs its program of ("F" or "B", segment)."""
        if form not in self._sizes:
            self._sizes[form] = self._sizes_of(form)
        inner = (action for action in program if self._segments[action[1]].inner)
        zeros = 1 if form == Form.SPANS else 0
        return _Allocator(*self._sizes[form], inner, zeros)

    def _sizes_of(self, form: Form) -> tuple[list[int], list[int | None], list[int]]:
        segments, num = self._segments, len(self._segments)
        above: list[int | None] = [None] * num
        if form == Form.POSITIONS:
            above = [_line_parent(segments, index) for index in range(num)]
            sizes = [segment.padded_length // self._shares for segment in segments]
        else:
            sizes = [sum(form.rows(span.padded) for span in s.spans) for s in segments]
        lines = list(sizes)
        for index in reversed(range(num)):
            parent = above[index]
            if parent is not None and segments[index].inner:
                lines[parent] = max(lines[parent], sizes[parent] + lines[index])
        return sizes, above, lines


class _Allocator:
    """Gives rows to inner segments at their forward and frees them at their backward.

    Args:
        sizes: rows of every segment.
        above: per segment the one directly behind which it should lie; None: anywhere.
        lines: rows of the longest line of segments from each one down.
        program: ("F" or "B", inner segment) in order.
        zeros: reserved rows at the front.

    Attributes:
        placed: rows of every inner segment.
        intervals: rows of every segment; None for a wave.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        above: Sequence[int | None],
        lines: Sequence[int],
        program: Iterable[tuple[str, int]],
        zeros: int,
    ) -> None:
        self.sizes, self.above, self.lines = sizes, above, lines
        self.length = self.zeros = zeros
        self.placed: dict[int, slice] = {}
        self.reserved: dict[int, slice] = {}  # by the first segment of a line
        self.gaps: list[tuple[int, float]] = [(zeros, math.inf)]  # free rows, ascending
        self.head: dict[int, int] = {}
        self.used: dict[int, list[int]] = {}  # by head, where segments in its reservation begin
        for kind, index in program:
            self.take(index) if kind == "F" else self.free(index)
        self.intervals = tuple(map(self.placed.get, range(len(sizes))))

    def take(self, index: int) -> None:
        """Places a segment behind its parent if there is room, else at the first gap."""
        parent, size = self.above[index], self.sizes[index]
        if parent is not None and self._fits_behind(parent, size):
            head, start = self.head[parent], self.placed[parent].stop
        else:
            rows = self.lines[index]
            place, (start, stop) = next(
                (place, gap) for place, gap in enumerate(self.gaps) if gap[1] - gap[0] >= rows
            )
            self.gaps[place : place + 1] = [(start + rows, stop)] if start + rows < stop else []
            self.reserved[index] = slice(start, start + rows)
            self.length = max(self.length, start + rows)
            head, self.used[index] = index, []
        self.head[index], self.placed[index] = head, slice(start, start + size)
        bisect.insort(self.used[head], start)

    def free(self, index: int) -> None:
        head = self.head[index]
        self.used[head].remove(self.placed[index].start)
        if head != index:
            return
        rows = self.reserved.pop(index)
        start, stop = rows.start, rows.stop
        place = bisect.bisect(self.gaps, (start,))
        if place < len(self.gaps) and self.gaps[place][0] == stop:
            _, stop = self.gaps.pop(place)
        if place and self.gaps[place - 1][1] == start:
            place -= 1
            start, _ = self.gaps.pop(place)
        self.gaps.insert(place, (start, stop))

    def _fits_behind(self, parent: int, size: int) -> bool:
        """No segment of the line begins before the end; what ends behind the parent is its own."""
        head, start = self.head[parent], self.placed[parent].stop
        used = self.used[head]
        following = bisect.bisect_left(used, start)
        end = used[following] if following < len(used) else self.reserved[head].stop
        return start + size <= end


def _line_parent(segments: Sequence[Segment], index: int) -> int | None:
    spans = [span for span in segments[index].spans if span.rollouts]
    parent = spans[0].parent if len(spans) == 1 else None
    return parent.segment if parent and len(segments[parent.segment].spans) == 1 else None


class _Levels:
    """Levels of segments whose spans begin at these rows, in their arenas' shares."""

    def __init__(self, starts: Sequence[Sequence[int]], shares: int) -> None:
        self._starts, self._shares = starts, shares

    def of(self, views: Views) -> tuple[Level, ...]:
        blocks: list[Run] = []  # of what all see: neighbours in the arena are one
        for view in itertools.chain(*views.levels[: views.common]):
            run = self._run(view)
            if blocks and blocks[-1].end == run.start:
                run = run._replace(start=blocks.pop().start)
            blocks.append(run)
        levels = [*itertools.chain(*map(self._pieces, blocks))]
        for level in views.levels[views.common :]:
            runs = tuple(map(self._run, level))
            levels += self._pieces(runs[0]) if len(runs) == 1 else [Level(runs)]
        return tuple(levels)

    def _run(self, view: View) -> Run:
        first, stop, place = view
        starts = self._starts[place.segment]
        return Run(first, stop, starts[place.number], starts[place.number + 1])

    def _pieces(self, run: Run) -> Iterator[Level]:
        """A single run as levels of at most PIECE_KEYS keys."""
        # Gathered keys of all ranks are sent back in one message, so they stay in one piece.
        longest = PIECE_KEYS if self._shares == 1 else run.end - run.start
        for first in range(run.start, run.end, longest):
            yield Level((run._replace(start=first, end=min(run.end, first + longest)),))
