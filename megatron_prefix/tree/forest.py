"""The data of a step: rollouts as pairs, spans, segments and their forest.  Pure: numpy only.

A *position* of a rollout is one (input token, label token) pair; a rollout of n tokens has n-1.
tree/build.py makes the forest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_prefix.errors import UserError

MOST_EXPERTS = 1 << 15
"""Experts of a layer that routes can name."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """One rollout as the tree sees it.

    Attributes:
        inputs: input token ids, int [num_positions].
        labels: label token ids, int [num_positions].
        trained: whether the position carries loss, bool [num_positions].
        routes: experts that every layer sends the input token to, int [num_positions, layers,
            topk]; positions with different routes are not shared. None: routers choose.
    """

    inputs: np.ndarray
    labels: np.ndarray
    trained: np.ndarray
    routes: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def first_trained(self) -> int:
        """First position with loss; the last position if there is none."""
        hits = np.flatnonzero(self.trained)
        return int(hits[0]) if len(hits) else len(self) - 1

    def codes(self) -> np.ndarray:
        """A code a position: equal where input, label and routes are, uint64 [num_positions, n]."""
        low = self.labels.astype(np.int64) & 0xFFFFFFFF
        pairs = (self.inputs.astype(np.int64) << 32 | low).astype(np.uint64)[:, None]
        if self.routes is None:
            return pairs
        routes = self.routes.reshape(len(self), -1).astype(np.uint16)
        padded = np.pad(routes, ((0, 0), (0, -routes.shape[1] % 4)))  # to whole 64 bits
        return np.hstack([pairs, padded.view(np.uint64)])


def check_routes(rollouts: Sequence[Pairs]) -> None:
    """Refuses routes that no model can follow.

    Raises:
        UserError: only some rollouts have routes, their shapes differ, or an expert's number is out
            of range.
    """
    shapes = {None if r.routes is None else r.routes.shape[1:] for r in rollouts}
    if len(shapes) > 1:
        found = ", ".join("none" if shape is None else str(list(shape)) for shape in shapes)
        raise UserError(f"rollouts with routes of several shapes ({found}): give all or none")
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


@dataclass(frozen=True)
class TreeOptions:
    """How rollouts become segments.

    Attributes:
        align: segment boundaries are multiples of it (1, or tp when sequence-parallel, times 2*cp).
        chunk_tokens: longest span; longer ones become a chain of chunks. 0: no limit.
        wave_tokens: most positions in a wave; a single leaf may exceed it. 0: no limit.
        min_gain: a shared span that saves fewer positions than this is dissolved into its
            children. 0 dissolves nothing.
        loss_in_leaves: positions from the first trained one on are shared only by equal rollouts.
        share: "group": one tree a group; "batch": one tree over all rollouts of the step.
    """

    align: int = 1
    chunk_tokens: int = 0
    wave_tokens: int = 4096
    min_gain: int = 64
    loss_in_leaves: bool = False
    share: str = "group"

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "wave_tokens", "min_gain"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}: give 0 (no limit) or more")
        if self.align < 1:
            raise UserError(f"align is {self.align}: give 1 or more")
        if 0 < self.chunk_tokens < self.align:
            raise UserError(
                f"chunk_tokens {self.chunk_tokens} is below the alignment {self.align} of this"
                f" layout: give 0 or at least {self.align}"
            )
        if self.share not in ("group", "batch"):
            raise UserError(f"share is {self.share!r}: give 'group' or 'batch'")


class Span(NamedTuple):
    """Consecutive positions of one or more rollouts inside a segment.

    Attributes:
        start: first position in the rollout.
        length: number of positions.
        padded: positions with padding, a multiple of the alignment, at least `length`.
        rollouts: indices of all rollouts that pass through these positions.
    """

    start: int
    length: int
    padded: int
    rollouts: tuple[int, ...]

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + self.length


class Segment(NamedTuple):
    """What one action runs: an inner segment (one span) or a wave (one span a leaf).

    Attributes:
        parent: index of the parent segment, -1 for a root.
        tree: index of the tree it belongs to.
        spans: what it computes.
        inner: whether other segments read its K/V.
        extends: whether it continues its parent's K/V buffer (a chunk chain).
        scored: whether its outputs reach a loss.
    """

    parent: int
    tree: int
    spans: tuple[Span, ...]
    inner: bool
    extends: bool
    scored: bool

    @property
    def padded_length(self) -> int:
        """Number of positions, padding included."""
        return sum(span.padded for span in self.spans)

    @property
    def start(self) -> int:
        """Position at which every span begins."""
        return self.spans[0].start


@dataclass(frozen=True)
class Forest:
    """All segments of a step in F-order (depth first, parents before children).

    Attributes:
        segments: in F-order.
        num_positions: positions of each rollout.
        first_trained: first trained position of each rollout.
        align: the alignment the segments were made for.
        ordered: whether a microbatch's losses need all microbatches before it (global_aux_loss).
        unshared_by_routes: positions computed again because routes differ.
    """

    segments: tuple[Segment, ...]
    num_positions: tuple[int, ...]
    first_trained: tuple[int, ...]
    align: int = 1
    ordered: bool = False
    unshared_by_routes: int = 0

    @property
    def raw_tokens(self) -> int:
        """Positions of all rollouts, shared or not."""
        return sum(self.num_positions)

    @cached_property
    def executed_tokens(self) -> int:
        """Positions that the prefix schedule computes, padding not counted."""
        return sum(span.length for segment in self.segments for span in segment.spans)

    @cached_property
    def max_depth(self) -> int:
        """Most segments on a path from a root to a leaf."""
        depth: list[int] = []
        for segment in self.segments:
            depth.append(1 if segment.parent < 0 else depth[segment.parent] + 1)
        return max(depth, default=0)

    @cached_property
    def paths(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per rollout its (segment, number of the span in it) pairs, root first."""
        paths: list[list[tuple[int, int]]] = [[] for _ in self.num_positions]
        for index, segment in enumerate(self.segments):
            for number, span in enumerate(segment.spans):
                for rollout in span.rollouts:
                    paths[rollout].append((index, number))
        return tuple(tuple(path) for path in paths)

    def to_ints(self) -> list[int]:
        """The forest as numbers, to send to ranks that read no data; `from_ints` reads them."""
        numbers = [self.align, int(self.ordered), self.unshared_by_routes, len(self.num_positions)]
        numbers += [*self.num_positions, *self.first_trained]
        for segment in self.segments:
            flags = segment.inner + 2 * segment.extends + 4 * segment.scored
            numbers += [segment.parent, segment.tree, flags, len(segment.spans)]
            for span in segment.spans:
                numbers += [
                    span.start,
                    span.length,
                    span.padded,
                    len(span.rollouts),
                    *span.rollouts,
                ]
        return numbers

    @classmethod
    def from_ints(cls, numbers: Sequence[int]) -> Forest:
        """See `to_ints`."""
        stream = iter(numbers)

        def take(count: int) -> tuple[int, ...]:
            return tuple(itertools.islice(stream, count))

        align, ordered, unshared, num_rollouts = take(4)
        num_positions, first_trained = take(num_rollouts), take(num_rollouts)
        segments = []
        while head := take(4):
            parent, tree, flags, num_spans = head
            spans = []
            for _ in range(num_spans):
                start, length, padded, members = take(4)
                spans.append(Span(start, length, padded, take(members)))
            inner, extends, scored = (bool(flags & bit) for bit in (1, 2, 4))
            segments.append(Segment(parent, tree, tuple(spans), inner, extends, scored))
        return cls(tuple(segments), num_positions, first_trained, align, bool(ordered), unshared)

    def ancestors(self, index: int) -> list[int]:
        """Segments whose K/V segment `index` reads, root first."""
        found = []
        while (index := self.segments[index].parent) >= 0:
            found.append(index)
        return found[::-1]
