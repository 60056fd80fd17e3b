"""Prefix trees -> segments that follow the trainer's microbatches.  Pure.

A microbatch's loss needs all its outputs, and until then they take memory. So the leaves of whole
microbatches, as many as fit into a segment, run in a *round*: they are its waves, meet their losses
and run backward before the next round. What they read runs right before the first round that needs
it, level by level, and lives to the last one. (Prompts first, then microbatches of suffixes:
"Schedule-Level Shared-Prefix Reuse for LLM RL Training", section 3.)

A segment of a hundred tokens costs nearly what one of thousands costs. So what few tokens of
prompts several rounds read runs together, before the first of them.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from megatron_prefix.tree.across_ranks import NOTHING_IN_COMMON, CommonSpans
from megatron_prefix.tree.forest import Exchange, Place, Segment, TreeOptions
from megatron_prefix.tree.joining import padded
from megatron_prefix.tree.nodes import Node, preorder
from megatron_prefix.tree.parts import even_parts
from megatron_prefix.tree.rounds import Rounds, Rows


class Packing:
    """The segments of trees.

    Args:
        roots: of all trees of a step.
        first_trained: of every rollout.
        options: see TreeOptions.
        microbatch_of: the trainer's microbatch of every rollout; None: one rollout each.
        common: what this rank has in common with others.
        rows: see Rounds.

    Attributes:
        segments: in F-order.
        inner: the nodes of every inner segment that the rank has for itself.
        exchanges: see Forest.
        windows: of every segment; see Forest.
        rounds: of every segment.
    """

    def __init__(
        self,
        roots: Sequence[Node],
        first_trained: Sequence[int],
        options: TreeOptions,
        microbatch_of: Sequence[int] | None = None,
        common: CommonSpans = NOTHING_IN_COMMON,
        rows: Rows | None = None,
    ) -> None:
        self.segments: list[Segment] = []
        self.inner: list[Sequence[Node]] = []
        self.exchanges: list[Exchange] = []
        self.windows: list[int] = []
        self.rounds: list[int] = []
        self._first, self._multiple = first_trained, options.multiple
        self._whole = options.whole
        self._budget = options.segment_tokens
        # By identity of nodes, so none of them may be gone before the end.
        self._parts: list[Node] = []
        self._places: dict[int, Place] = {}
        self._parents: dict[int, Node] = {}
        self._owner = range(len(first_trained)) if microbatch_of is None else microbatch_of
        self._common = common
        rounds = Rounds(self._inner(roots), _leaves(roots), self._owner, options, common, rows)
        shared = {node.common: node for node in preorder(roots) if node.common >= 0}
        self._window, self._round = -1, 0
        for together in rounds.together():
            self._begin(rounds.windows[together[0]], common, shared)
            self._round = together[0]
            levels: dict[int, list[Node]] = collections.defaultdict(list)
            for depth, node in itertools.chain(*(rounds.inner[number] for number in together)):
                levels[depth].append(node)
            for depth in sorted(levels):
                self._fill(levels[depth], inner=True)
            for number in together:
                self._round = number
                self._fill(rounds.lasting[number], inner=False)
                self._fill([self._part(*part) for part in rounds.leaves[number]], inner=False)
        self._begin(common.num_windows - 1, common, shared)

    def _begin(self, window: int, common: CommonSpans, nodes: Mapping[int, Node]) -> None:
        """Adds what crosses ranks when windows up to this one begin, as far as this rank has it."""
        while self._window < window:
            self._window += 1
            for one in common.beginning(self._window):
                source, spans = common.source(one), common.here(one)
                peers = common.peers(one) if source < 0 else ((source, tuple(range(len(spans)))),)
                span, number = common.spans[one.spans[0]], len(self.segments)
                self.exchanges.append(Exchange(number, one.first, one.last, peers, span.level))
                self._add([nodes[span] for span in spans], inner=True, source=source)
                # Losses of any rank may look at any of its positions.
                self.segments[-1] = self.segments[-1]._replace(scored=span.scored)

    def _inner(self, roots: Sequence[Node]) -> Iterator[tuple[int, Node]]:
        """The nodes that others read, each with the number of nodes above it, level by level."""
        here = [node for node in roots if node.children]
        for depth in itertools.count():
            if not here:
                return
            yield from ((depth, node) for node in here if node.common < 0)
            below = [(node, child) for node in here for child in node.children]
            self._parents.update((id(child), node) for node, child in below)
            here = [child for _, child in below if child.children]

    def _part(self, leaf: Node, members: list[int]) -> Node:
        """A leaf of some of its rollouts."""
        if len(members) == len(leaf.members):
            return leaf
        part = replace(leaf, members=members)
        self._parts.append(part)
        if id(leaf) in self._parents:
            self._parents[id(part)] = self._parents[id(leaf)]
        return part

    def _fill(self, nodes: Sequence[Node], *, inner: bool) -> None:
        """Adds nodes as the fewest segments of about equal length.

        What hangs below one node is side by side, so that it is one run of queries. Nodes that are
        needed up to different windows are apart: what they read must end with their window.
        """
        for _, alike in itertools.groupby(sorted(nodes, key=self._last), self._last):
            some = sorted(alike, key=self._path)
            lengths = [node.padded(self._multiple) for node in some]
            for start, stop in even_parts(lengths, self._budget):
                self._add(some[start:stop], inner=inner)

    def _last(self, node: Node) -> int:
        """The last window that needs a node."""
        if self._common.num_windows == 1:
            return 0
        return max(self._common.window_of(self._owner[member]) for member in node.members)

    def _add(self, nodes: Sequence[Node], *, inner: bool, source: int = -1) -> None:
        for number, node in enumerate(nodes):
            self._places[id(node)] = Place(len(self.segments), number)
        parents = [self._parents.get(id(node)) for node in nodes]
        spans = tuple(
            node.span(self._multiple, None if parent is None else self._places[id(parent)])
            for node, parent in zip(nodes, parents, strict=True)
        )
        scored = any(self._first[m] < span.end for span in spans for m in span.rollouts)
        if source < 0:
            spans = padded(spans, self._whole, inner=inner)
        self.segments.append(Segment(spans, inner, scored, source=source))
        self.windows.append(self._window)
        self.rounds.append(self._round)
        if inner and nodes[0].common < 0:
            self.inner.append(nodes)

    def _path(self, node: Node) -> list[Place]:
        """Where the nodes above one are, root first; all of them have a place."""
        path: list[Place] = []
        above = self._parents.get(id(node))
        while above is not None:
            path.append(self._places[id(above)])
            above = self._parents.get(id(above))
        return path[::-1]


def _leaves(roots: Sequence[Node]) -> list[Node]:
    return [node for node in preorder(roots) if not node.children]
