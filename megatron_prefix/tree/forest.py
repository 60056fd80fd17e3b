"""The data of a step: rollouts as pairs, spans, segments and their forest.  Pure: numpy only.

A *position* of a rollout is one (input token, label token) pair; a rollout of n tokens has n-1.
tree/build.py makes the forest.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from megatron_prefix.errors import UserError

LEAST_SHARE = 16
"""An inner segment that saves one in so many of all positions of a step is kept, however small."""
MOST_EXPERTS = 1 << 15
"""Experts of a layer that routes can name."""
AT_ONCE = 1 << 14
"""Positions that are compared at once: their codes fit a core's cache."""
_LAST = np.uint64(1 << 63)
"""Marks the code of a last position; no input is as large."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """One rollout as the tree sees it.

    Attributes:
        inputs: input token ids, int [num_positions].
        labels: label token ids, int [num_positions].
        trained: whether the position carries loss, bool [num_positions].
        routes: experts that every layer sends the input token to, int [num_positions, layers,
            topk]; positions with different routes are not shared. None: routers choose.
        weights: with multi-token prediction the loss mask of the labels, float64 [num_positions].
            The model then reads the input after a position, so a rollout's last position, which
            has none, is shared with last positions only. Else None.
        following: the next inputs of each position that are read with it and of which its label
            does not tell, int [num_positions, n]; positions that differ in them are not shared.
            None: there are none.
        needed: number of leading positions that are computed, at least one. None: all.
    """

    inputs: np.ndarray
    labels: np.ndarray
    trained: np.ndarray
    routes: np.ndarray | None = None
    weights: np.ndarray | None = None
    following: np.ndarray | None = None
    needed: int | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def num_needed(self) -> int:
        return len(self) if self.needed is None else self.needed

    @property
    def first_trained(self) -> int:
        """First position with loss; without one the last position that is computed."""
        first = int(self.trained.argmax())
        return first if self.trained[first] else self.num_needed - 1

    def up_to_loss(self) -> Pairs:
        """Not computed beyond the last position with loss; see `up_to_losses`."""
        return replace(self, needed=int(up_to_losses(self.trained, [len(self)])[0]))

    def codes(self, start: int = 0, end: int | None = None) -> np.ndarray:
        return codes_of([self], start, [len(self) if end is None else end])[0]


def shifted(column: np.ndarray, by: int, filler: float) -> np.ndarray:
    """A column moved to the front by so many positions, with fillers behind."""
    by = min(by, len(column))
    return np.append(column[by:], np.full(by, filler, column.dtype))


def up_to_losses(trained: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """Per rollout the number of positions up to its last one with loss, int64 [rollouts]; at least
    two, as an output of one position does not show which dimension positions are.

    Args:
        trained: flags of all rollouts, concatenated.
        lengths: positions of each.
    """
    ends, at = np.cumsum(lengths), np.append(-1, np.flatnonzero(trained))
    last = at[np.searchsorted(at, ends) - 1]
    return np.maximum(last + 1 - (ends - lengths), np.minimum(2, lengths))


def pair_codes(rollouts: Sequence[Pairs], start: int, ends: Sequence[int]) -> Iterator[np.ndarray]:
    """Per rollout a number for each (input of 63 bits, label of 32) from `start` to its end, uint64
    [positions]. In batches: single rollouts cost calls, and all at once fresh pages of memory."""
    places = [*itertools.accumulate(ends, initial=0)]
    for _, batch in itertools.groupby(range(len(ends)), lambda number: places[number] // AT_ONCE):
        cuts = [(rollouts[number], slice(start, ends[number])) for number in batch]
        inputs = [rollout.inputs[cut] for rollout, cut in cuts]
        numbers = np.concatenate(inputs, dtype=np.int64)
        labels = np.concatenate([rollout.labels[cut] for rollout, cut in cuts], dtype=np.int64)
        codes = numbers << 32 | (labels ^ numbers >> 32) & 0xFFFFFFFF
        bounds = itertools.accumulate(map(len, inputs), initial=0)
        yield from (codes.view(np.uint64)[a:b] for a, b in itertools.pairwise(bounds))


def codes_of(rollouts: Sequence[Pairs], start: int, ends: Sequence[int]) -> list[np.ndarray]:
    """Per rollout a code per position in [start, end), equal exactly if input, label, routes and,
    where they are read, the next inputs are equal: uint64 [positions, n]."""
    codes = []
    for rollout, end, pairs in zip(rollouts, ends, pair_codes(rollouts, start, ends), strict=True):
        if rollout.weights is not None and end == len(rollout):
            pairs[-1:] |= _LAST
        columns = [pairs[:, None]]
        if rollout.following is not None:
            columns.append(rollout.following[start:end].astype(np.uint64))
        if rollout.routes is not None:
            routes = rollout.routes.reshape(len(rollout), -1)[start:end].astype(np.uint16)
            padded = np.pad(routes, ((0, 0), (0, -routes.shape[1] % 4)))  # to whole 64 bits
            columns.append(padded.view(np.uint64))
        codes.append(np.hstack(columns) if len(columns) > 1 else columns[0])
    return codes


def check_routes(rollouts: Sequence[Pairs]) -> None:
    """Refuses routes that no model can follow.

    Raises:
        UserError: only some rollouts have routes, their shapes differ, or an expert's number is out
            of range.
    """
    shapes = {None if r.routes is None else r.routes.shape[1:] for r in rollouts}
    if len(shapes) > 1:
        listed = ", ".join("none" if shape is None else str(list(shape)) for shape in shapes)
        raise UserError(f"rollouts with routes of several shapes ({listed}): give all or none")
    for index, rollout in enumerate(rollouts):
        routes = rollout.routes
        if routes is None:
            return
        if routes.ndim != 3 or len(routes) != len(rollout):
            raise UserError(
                f"rollout {index}: routes {list(routes.shape)} for {len(rollout)} positions: give"
                " [positions, layers, topk]"
            )
        if routes.size and not 0 <= routes.min() <= routes.max() < MOST_EXPERTS:
            raise UserError(
                f"rollout {index}: routes from {routes.min()} to {routes.max()}: give the number of"
                f" an expert, 0 to {MOST_EXPERTS - 1}, for every position, layer and choice"
            )


EVEN_PARTS = 32
"""Lengths of segments where lengths are to come again (`TreeOptions.even`)."""


@dataclass(frozen=True)
class TreeOptions:
    """How rollouts become spans, and spans segments.

    Attributes:
        multiple: spans are padded to multiples of it (1, or tp when sequence-parallel, times 2*cp).
        chunk_tokens: longest span; longer ones become a chain of chunks. 0: no limit.
        segment_tokens: most positions in a segment; a single span may exceed it. 0: no limit.
        min_gain: a shared span that saves fewer positions is dissolved into its children.
        segment_gain: an inner segment that saves fewer positions than this, and less than a 16th
            of the step, is dissolved or runs in the waves that read it: an action has a fixed
            cost.
        loss_in_leaves: positions from the first trained one on are shared only by equal rollouts.
        share: "group": one tree per group; "batch": one tree over all rollouts of the step.
        cut: spans begin at multiples of it, too. Nothing is padded to it.
        pad_multiple: segments are padded to multiples of it and of `multiple`: products in FP8 take
            so many positions at once (layers/precision.py).
        even: segments of at most so many positions are padded to multiples of an EVEN_PARTS-th of
            it, so that lengths come again. 0: none are.
    """

    multiple: int = 1
    chunk_tokens: int = 0
    segment_tokens: int = 16384
    min_gain: int = 32
    segment_gain: int = 0
    loss_in_leaves: bool = False
    share: str = "group"
    cut: int = 1
    pad_multiple: int = 1
    joins: bool = False
    even: int = 0

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "segment_tokens", "min_gain", "segment_gain"):
            if getattr(self, name) < 0:
                least = "0 (no limit)" if name.endswith("tokens") else "0"
                raise UserError(f"{name} is {getattr(self, name)}: give {least} or more")
        for name in ("multiple", "pad_multiple", "cut"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: give 1 or more")
        if 0 < self.chunk_tokens < self.boundary:
            raise UserError(
                f"chunk_tokens {self.chunk_tokens} is below the alignment {self.boundary} of"
                f" spans: give 0 or at least {self.boundary}"
            )
        if self.joins and self.chunk_tokens:
            raise UserError("joins with chunk_tokens: a chunk cannot run beside the next one")
        if self.share not in ("group", "batch"):
            raise UserError(f"share is {self.share!r}: give 'group' or 'batch'")

    @property
    def boundary(self) -> int:
        return math.lcm(self.multiple, self.cut)

    @property
    def even_step(self) -> int:
        """Segments of at most `even` positions are padded to multiples of it."""
        step = max(1, self.even // EVEN_PARTS // self.multiple) * self.multiple
        return math.lcm(self.pad_multiple, step)

    def missing(self, length: int) -> int:
        padding = -length % self.even_step
        return padding if length + padding <= self.even else -length % self.pad_multiple

    def rounded(self, position: int) -> int:
        return position // self.boundary * self.boundary


class Place(NamedTuple):
    """Address of a span: its segment and its number in it."""

    segment: int
    number: int


class Span(NamedTuple):
    """Consecutive positions of one or more rollouts: a node of a prefix tree.

    Attributes:
        start: first position in the rollout.
        padded: positions with padding, a multiple of the alignment, at least `length`.
        rollouts: indices of all rollouts that pass through these positions.
        parent: the span that it continues; None for a root.
    """

    start: int
    length: int
    padded: int
    rollouts: tuple[int, ...]
    parent: Place | None = None

    @property
    def end(self) -> int:
        return self.start + self.length


def any_trained(span: Span, trained: Sequence[np.ndarray], first: Sequence[int]) -> np.ndarray:
    """Whether each position of a span carries loss in any of its rollouts, bool [length]; it may be
    a view of `trained`, the flags of every rollout, of which `first` has the first positions."""
    start, end = span.start, span.start + span.length
    flags = [trained[rollout][start:end] for rollout in span.rollouts if first[rollout] < end]
    return functools.reduce(operator.or_, flags) if flags else np.zeros(span.length, bool)


class Segment(NamedTuple):
    """What one action runs: spans of one tree or of many.

    Attributes:
        spans: what it computes; siblings are neighbours, and come after a parent in this segment.
        inner: whether its K/V are read, by other segments or by its own spans; else it is a wave.
        scored: whether its outputs reach a loss on any data-parallel rank that has it.
        source: the data-parallel rank that computes it and sends its payload here; -1: this rank.
            A received segment is inner; the output layer runs here if it is scored.
        above: positions of all ancestors of its spans, each counted once; None outside a forest.
        joined: the segment's own number if some of its spans continue others of its spans; then no
            other segment reads it (tree/joining.py). -1: no span is an ancestor of another.
    """

    spans: tuple[Span, ...]
    inner: bool
    scored: bool
    trained: int | None = None
    source: int = -1
    above: int | None = None
    joined: int = -1

    @property
    def waits(self) -> bool:
        """Whether its backward waits for other segments, which read it."""
        return self.inner and self.joined < 0

    @property
    def padded_length(self) -> int:
        return sum(span.padded for span in self.spans)

    @property
    def num_read(self) -> int:
        """Positions whose outputs losses read: all of a scored segment if that is unknown."""
        if not self.scored:
            return 0
        return self.padded_length if self.trained is None else self.trained

    @property
    def parents(self) -> tuple[int, ...]:
        segments = {span.parent.segment for span in self.spans if span.parent}
        return tuple(sorted(segments - {self.joined}))

    def microbatches(self, microbatch_of: Sequence[int]) -> set[int]:
        """The trainer's microbatches of its rollouts; `microbatch_of`: of each of the step's."""
        return {microbatch_of[rollout] for span in self.spans for rollout in span.rollouts}


def padded(spans: tuple[Span, ...], options: TreeOptions, *, inner: bool) -> tuple[Span, ...]:
    """A segment's spans with what it is padded by: at the end of its last leaf; behind spans that
    others read, as a span of no rollout."""
    missing = options.missing(sum(span.padded for span in spans))
    if not missing:
        return spans
    if inner:
        return *spans, Span(0, 0, missing, ())
    *leading, last = spans
    return *leading, last._replace(padded=last.padded + missing)


def with_above(segments: Sequence[Segment]) -> Iterator[Segment]:
    """Sets `above` of segments in F-order."""
    for segment in segments:
        ancestors: dict[Place, int] = {}
        for place in (span.parent for span in segment.spans):
            while place is not None and place not in ancestors:
                span = segments[place.segment].spans[place.number]
                ancestors[place], place = span.length, span.parent
        yield segment._replace(above=sum(ancestors.values()))


def joined_of(index: int, spans: Sequence[Span]) -> int:
    """`Segment.joined` of segment `index` with these spans."""
    return index if any(span.parent and span.parent.segment == index for span in spans) else -1


class Exchange(NamedTuple):
    """A segment that a rank computes for other data-parallel ranks, or gets from one of them.

    Attributes:
        peers: (rank, numbers of spans): the ranks that get it, or the single rank that sends it;
            empty where only other ranks of a joint plan have such a segment.
        depth: number of ancestors that cross.
    """

    segment: int
    peers: tuple[tuple[int, tuple[int, ...]], ...]
    depth: int


@dataclass(frozen=True)
class Forest:
    """All segments of a step in F-order: parents before children.

    Attributes:
        first_trained: first trained position of each rollout.
        ordered: whether a microbatch's losses need all microbatches before it (global_aux_loss).
        unshared_by_routes: positions computed again because routes of this rank's rollouts differ.
        exchanges: segments that cross data-parallel ranks, in one order on all ranks.
        rounds: per segment the number of its round of microbatches, ascending, if the ranks that
            share experts have the same rounds; else empty.
        requested_length: most positions in a segment that the rank would choose if it shared no
            experts; 0: it has no choice.
    """

    segments: tuple[Segment, ...]
    num_positions: tuple[int, ...]
    first_trained: tuple[int, ...]
    multiple: int = 1
    ordered: bool = False
    unshared_by_routes: int = 0
    exchanges: tuple[Exchange, ...] = ()
    rounds: tuple[int, ...] = ()
    pad_multiple: int = 1
    requested_length: int = 0

    def __post_init__(self) -> None:
        if any(segment.above is None for segment in self.segments):
            object.__setattr__(self, "segments", tuple(with_above(self.segments)))

    @property
    def raw_tokens(self) -> int:
        return sum(self.num_positions)

    @functools.cached_property
    def executed_tokens(self) -> int:
        """Positions computed on this rank, without padding."""
        return sum(
            s.length for segment in self.segments if segment.source < 0 for s in segment.spans
        )

    @functools.cached_property
    def received_tokens(self) -> int:
        return sum(
            s.length for segment in self.segments if segment.source >= 0 for s in segment.spans
        )

    @functools.cached_property
    def paths(self) -> tuple[tuple[Place, ...], ...]:
        """Per rollout the places of its spans, root first, as far as it is computed."""
        paths: list[list[Place]] = [[] for _ in self.num_positions]
        for index, segment in enumerate(self.segments):
            for number, span in enumerate(segment.spans):
                place = Place(index, number)
                for rollout in span.rollouts:
                    paths[rollout].append(place)
        return tuple(map(tuple, paths))

    def all_read(self) -> Forest:
        """With losses that read all positions of scored segments, as in the stock schedule."""
        segments = (segment._replace(trained=None) for segment in self.segments)
        return replace(self, segments=tuple(segments))

    def __getstate__(self) -> dict[str, Any]:
        """For ranks of a job: nothing that is cached."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
