"""Which of the trainer's microbatches run together, and what of a tree runs with them.  Pure."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_prefix.tree.across_ranks import CommonSpans
from megatron_prefix.tree.forest import Forest, TreeOptions
from megatron_prefix.tree.nodes import Node
from megatron_prefix.tree.parts import even_parts


class Rows(NamedTuple):
    """Positions of a step's spans by microbatch, each span with the first one that needs it.

    Attributes:
        inner: of spans that others read, of every microbatch.
        leaves: of the others.
    """

    inner: tuple[int, ...]
    leaves: tuple[int, ...]

    @classmethod
    def of(cls, forest: Forest, microbatch_of: Sequence[int]) -> Rows:
        """Of segments, with the microbatch of each rollout."""
        rows = [[0] * (max(microbatch_of, default=-1) + 1) for _ in range(2)]
        for segment in forest.segments:
            for span in segment.spans:
                first = min(microbatch_of[rollout] for rollout in span.rollouts)
                rows[not segment.inner][first] += span.padded
        return cls(*map(tuple, rows))

    @classmethod
    def most(cls, several: Iterable[Rows]) -> Rows:
        """Of every microbatch those of the rank that has most."""
        inner, leaves = zip(*several, strict=True)
        largest = [map(max, itertools.zip_longest(*one, fillvalue=0)) for one in (inner, leaves)]
        return cls(*map(tuple, largest))


class Rounds:
    """Which microbatches run together.

    Args:
        inner: nodes that others read, each with the number of nodes above it.
        leaves: the others.
        owner: the microbatch of every rollout.
        options: see TreeOptions.
        common: what data-parallel ranks have in common; a round is in one of its windows.
        rows: by which microbatches are cut; None: by those of `inner` and `leaves`.

    Attributes:
        windows: per round its window.
        inner: per round the nodes of `inner` that no earlier one needs.
        leaves: per round its leaves, each with those of its rollouts that are in the round.
        lasting: per round the leaves that it needs first, and later rounds too.
    """

    def __init__(
        self,
        inner: Iterable[tuple[int, Node]],
        leaves: list[Node],
        owner: Sequence[int],
        options: TreeOptions,
        common: CommonSpans,
        rows: Rows | None = None,
    ) -> None:
        self._common = common
        self._owner, self._multiple, self._budget = owner, options.multiple, options.segment_tokens
        inner = [*inner]
        if rows is None:
            mine: Any = self._rows(node for _, node in inner), self._rows(leaves)
            rounds = list(self._rounds(sorted({*owner}), *mine))
        else:
            mine = rows
            rounds = list(self._rounds(range(len(rows.leaves)), *rows))
        self._new = [sum(mine[0][one] for one in some) for some in rounds]
        self.windows = [common.window_of(some[0]) for some in rounds]
        self._round_of = {one: number for number, some in enumerate(rounds) for one in some}
        self.inner: list[list[tuple[int, Node]]] = [[] for _ in rounds]
        self.leaves: list[list[tuple[Node, list[int]]]] = [[] for _ in rounds]
        self.lasting: list[list[Node]] = [[] for _ in rounds]
        for depth, node in inner:
            self.inner[self._round_of[self._first(node)]].append((depth, node))
        for leaf in leaves:
            self._place(leaf, options.segment_gain)

    def _first(self, node: Node) -> int:
        """The first microbatch that needs a node."""
        return min(self._owner[member] for member in node.members)

    def _place(self, leaf: Node, least: int) -> None:
        """Gives a leaf to its rounds. Equal rollouts of several rounds have one leaf, in a segment
        that waits for all their losses, unless that saves fewer positions than `least`."""
        parts: dict[int, list[int]] = collections.defaultdict(list)
        for member in leaf.members:
            parts[self._round_of[self._owner[member]]].append(member)
        if len(parts) > 1 and (len(parts) - 1) * (leaf.end - leaf.start) >= least:
            self.lasting[min(parts)].append(leaf)
            return
        for number, members in parts.items():
            self.leaves[number].append((leaf, members))

    def together(self) -> Iterator[range]:
        """Rounds of a window whose inner nodes run together: those that have a segment of them at
        most."""
        start, rows = 0, 0
        for number, new in enumerate(self._new):
            full = 0 < self._budget < rows + new
            if number > start and (full or self.windows[number] != self.windows[start]):
                yield range(start, number)
                start, rows = number, 0
            rows += new
        if self.inner:
            yield range(start, len(self.inner))

    def _rows(self, nodes: Iterable[Node]) -> collections.Counter[int]:
        """Per microbatch the positions of nodes that no earlier one needs."""
        rows = collections.Counter[int]()
        for node in nodes:
            rows[self._first(node)] += node.padded(self._multiple)
        return rows

    def _rounds(
        self,
        microbatches: Sequence[int],
        inner: Mapping[int, int] | Sequence[int],
        leaves: Mapping[int, int] | Sequence[int],
    ) -> Iterator[Sequence[int]]:
        """Microbatches in order, as many a round as fit, about equally many positions in each.

        A round begins with the first one of a window, and with one that adds more than half a
        segment of inner nodes: they would live at once with those of the microbatches before it.
        """
        windows = [self._common.window_of(one) for one in microbatches]
        begins = [
            place
            for place, one in enumerate(microbatches)
            if not place
            or windows[place] != windows[place - 1]
            or 0 < self._budget < 2 * inner[one]
        ]
        for start, stop in itertools.pairwise([*begins, len(microbatches)]):
            run = microbatches[start:stop]
            for low, high in even_parts([max(1, leaves[one]) for one in run], self._budget):
                yield run[low:high]
