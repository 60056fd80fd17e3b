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
import functools
import heapq
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_prefix.tree.forest import Exchange, Forest, Place, Segment, TreeOptions, padded
from megatron_prefix.tree.joining import joined_segment, trees_of
from megatron_prefix.tree.nodes import Node, dissolved, even_parts, forks, joins_waves, preorder

_LEAST = 8
"""A round's waves take in spans only where that saves this fraction of `segment_gain`."""


class MicrobatchRows(NamedTuple):
    """Positions of a step's spans per microbatch; a span counts in the first that needs it.

    Attributes:
        inner: of spans that others read.
        leaves: of the others.
    """

    inner: tuple[int, ...]
    leaves: tuple[int, ...]

    @classmethod
    def of(cls, forest: Forest, microbatch_of: Sequence[int]) -> MicrobatchRows:
        rows = [[0] * (max(microbatch_of, default=-1) + 1) for _ in range(2)]
        for segment in forest.segments:
            for span in (span for span in segment.spans if span.rollouts):  # a dummy has none
                first = min(microbatch_of[rollout] for rollout in span.rollouts)
                rows[not segment.inner][first] += span.padded
        return cls(*map(tuple, rows))

    @classmethod
    def most(cls, ranks: Iterable[MicrobatchRows]) -> MicrobatchRows:
        inner, leaves = zip(*ranks, strict=True)
        largest = [
            map(max, itertools.zip_longest(*counts, fillvalue=0)) for counts in (inner, leaves)
        ]
        return cls(*map(tuple, largest))


class Rounds:
    """Which microbatches run together.

    Args:
        inner: (depth, node) of segments that others read.
        leaves: all other nodes: leaves, and nodes that join the waves that read them.
        owner: the microbatch of every rollout.
        rows: positions by which rounds are cut; None: those of `inner` and `leaves`.

    Attributes:
        inner: per round the (depth, node) of `inner` that it is the first to need.
    """

    def __init__(
        self,
        inner: Iterable[tuple[int, Node]],
        leaves: list[Node],
        owner: Sequence[int],
        options: TreeOptions,
        rows: MicrobatchRows | None,
    ) -> None:
        self._owner, self._multiple, self._budget = owner, options.multiple, options.segment_tokens
        self._leaves, self._least = leaves, options.segment_gain
        inner = [*inner]
        if rows is None:
            rows_of: Any = self._rows(node for _, node in inner), self._rows(leaves)
            microbatches: Sequence[int] = sorted({*owner})
        else:
            rows_of, microbatches = rows, range(len(rows.leaves))
        rounds = list(self._rounds(microbatches, *rows_of))
        self._new = [sum(rows_of[0][microbatch] for microbatch in members) for members in rounds]
        self._round_of = {
            microbatch: number for number, members in enumerate(rounds) for microbatch in members
        }
        self.inner: list[list[tuple[int, Node]]] = [[] for _ in rounds]
        for depth, node in inner:
            self.inner[self._round_of[self._first(node)]].append((depth, node))

    def _first(self, node: Node) -> int:
        members, owner = node.members, self._owner
        return owner[members[0]] if len(members) == 1 else min([owner[m] for m in members])

    def leaves(self) -> list[tuple[tuple[int, bool], list[tuple[Node, list[int]]]]]:
        """By round the nodes in which rollouts end, each with the round's rollouts among them;
        before those the nodes that it and later rounds share (False), with all their rollouts.

        Equal rollouts of several rounds share a leaf, whose segment waits for all their losses, if
        that saves `segment_gain` positions.
        """
        leaves: dict[tuple[int, bool], list[tuple[Node, list[int]]]] = {}
        for leaf in self._leaves:
            parts: dict[int, list[int]] = {}
            for member in (ending := leaf.ending() if leaf.children else leaf.members):
                parts.setdefault(self._round_of[self._owner[member]], []).append(member)
            lasts = len(parts) > 1 and (len(parts) - 1) * (leaf.end - leaf.start) >= self._least
            for number, members in ((min(parts), ending),) if lasts else parts.items():
                leaves.setdefault((number, not lasts), []).append((leaf, members))
        return sorted(leaves.items())

    def num(self, rollouts: Iterable[int]) -> int:
        return len({self._round_of[self._owner[rollout]] for rollout in rollouts})

    def together(self) -> Iterator[range]:
        """Consecutive rounds whose new inner nodes fit one segment."""
        start, rows = 0, 0
        for number, new in enumerate(self._new):
            if number > start and 0 < self._budget < rows + new:
                yield range(start, number)
                start, rows = number, 0
            rows += new
        if self.inner:
            yield range(start, len(self.inner))

    def _rows(self, nodes: Iterable[Node]) -> list[int]:
        rows = [0] * (max(self._owner, default=-1) + 1)
        for node in nodes:
            rows[self._first(node)] += node.padded(self._multiple)
        return rows

    def _rounds(
        self, microbatches: Sequence[int], inner: Sequence[int], leaves: Sequence[int]
    ) -> Iterator[Sequence[int]]:
        """Microbatches in order, as many a round as fit, in rounds of about equal length.

        A microbatch that adds more than half a segment of inner nodes begins a round: its inner
        nodes should not live together with earlier ones.
        """
        begins = [
            place
            for place, microbatch in enumerate(microbatches)
            if not place or 0 < self._budget < 2 * inner[microbatch]
        ]
        for start, stop in itertools.pairwise([*begins, len(microbatches)]):
            run = microbatches[start:stop]
            for low, high in even_parts(
                [max(1, leaves[microbatch]) for microbatch in run], self._budget
            ):
                yield run[low:high]


def _ends(node: Node) -> int:
    return sum([not below.children or bool(below.ending()) for below in preorder([node])])


class ExchangedSegment(NamedTuple):
    """A segment that crosses data-parallel ranks, as one of them has it.

    Attributes:
        spans: of each of its nodes `Node.common`.
        source, scored: see Segment.
        peers, depth: see Exchange.
    """

    spans: tuple[int, ...]
    source: int
    peers: tuple[tuple[int, tuple[int, ...]], ...]
    depth: int
    scored: bool


class _Nodes(NamedTuple):
    """The nodes of a segment, its round, and its padded length; `source`, `scored`: see Segment;
    None: derived from the losses."""

    nodes: Sequence[Node]
    inner: bool
    round: int
    length: int
    source: int = -1
    scored: bool | None = None


class Packing:
    """The segments of trees.

    Most are only tried, for what their inner segments save, so waves are made when `nodes` is first
    read.

    Attributes:
        inner: the nodes of every inner segment that does not cross ranks.
        nodes: of every segment.
    """

    def __init__(
        self,
        roots: Sequence[Node],
        first_trained: Sequence[int],
        options: TreeOptions,
        owner: Sequence[int],
        exchanged: Sequence[ExchangedSegment] = (),
        rows: MicrobatchRows | None = None,
    ) -> None:
        self.roots = roots
        self.inner: list[Sequence[Node]] = []
        self.exchanges: list[Exchange] = []
        self._first, self._options, self._multiple = first_trained, options, options.multiple
        # By id of nodes, all of which outlive this object. Paths count inner segments alone.
        self._paths: dict[int, tuple[Place, ...]] = {}  # to what others read, root first
        self._parents: dict[int, Node] = {}
        self._read: list[_Nodes] = []
        leaves = [node for node in preorder(roots) if node.joins or not node.children]
        self._rounds = rounds = Rounds(self._inner(roots), leaves, owner, options, rows)
        if exchanged:
            nodes = {node.common: node for node in preorder(roots) if node.common >= 0}
            self._cross(exchanged, nodes)
        for together in rounds.together():
            levels: dict[int, list[Node]] = collections.defaultdict(list)
            for depth, node in itertools.chain(*(rounds.inner[number] for number in together)):
                levels[depth].append(node)
            for depth in sorted(levels):
                for added in self._filled(levels[depth], together[0], inner=True):
                    self._add(added)

    def saved(self, node: Node) -> int:
        """Positions that the node's own segment saves: without it the node runs once in every round
        if it may join waves, else in every child, and in every leaf below a child that joins
        waves."""
        if joins_waves(node, self._options):
            return max(node.saved, (self._rounds.num(node.members) - 1) * (node.end - node.start))
        joined = [child for child in node.children if child.joins]
        return node.saved + (sum(map(_ends, joined)) - len(joined)) * (node.end - node.start)

    def _cross(self, exchanged: Sequence[ExchangedSegment], nodes: Mapping[int, Node]) -> None:
        for segment in exchanged:
            self.exchanges.append(Exchange(len(self._read), segment.peers, segment.depth))
            # Losses of any rank may look at any of its positions.
            local = [nodes[number] for number in segment.spans]
            length = sum(node.padded(self._multiple) for node in local)
            length += self._options.missing(length) if segment.source < 0 else 0
            self._add(_Nodes(local, True, 0, length, segment.source, segment.scored))

    def _inner(self, roots: Sequence[Node]) -> Iterator[tuple[int, Node]]:
        level = [node for node in roots if node.children]
        for depth in itertools.count():
            if not level:
                return
            yield from ((depth, node) for node in level if node.common < 0 and not node.joins)
            for node in level:
                self._parents.update(dict.fromkeys(map(id, node.children), node))
            level = [child for node in level for child in node.children if child.children]

    def _trees(self, leaves: Iterable[tuple[Node, list[int]]]) -> list[Node]:
        """The subtree of each leaf's joined ancestors, cut to the leaf's rollouts; plain leaves
        stay as they are."""
        nodes = list[Node]()
        paths: dict[int, dict[int, list[Node]]] = {}  # of rollouts, by what all of them is below
        above: dict[int, Node | None] = {}
        for leaf, members in leaves:
            parent = self._parents.get(id(leaf))
            if not leaf.children and (parent is None or not parent.joins):
                is_complete = len(members) == len(leaf.members)
                nodes.append(
                    leaf if is_complete else self._below(parent, replace(leaf, members=members))
                )
                continue
            path = [leaf]
            while parent is not None and parent.joins:
                path, parent = [parent, *path], self._parents.get(id(parent))
            above[id(parent)] = parent
            paths.setdefault(id(parent), {}).update(dict.fromkeys(members, path))
        trees = {
            key: trees_of(sorted(paths_of), paths_of, self._options)
            for key, paths_of in paths.items()
        }
        saved = sum(node.saved for roots in trees.values() for node in forks(roots))
        for key, roots in trees.items():
            if saved * _LEAST < self._options.segment_gain:
                roots = dissolved(roots, lambda _: False)
            nodes += [self._below(above[key], root) for root in roots]
        return nodes

    def _below(self, parent: Node | None, node: Node) -> Node:
        if parent is not None:
            self._parents[id(node)] = parent
        return node

    def _filled(self, nodes: Sequence[Node], number: int, *, inner: bool) -> Iterator[_Nodes]:
        """Nodes as a round's fewest segments of about equal length; waves include descendants.

        Siblings are neighbours, so that they are one run of queries.
        """
        ordered = sorted(nodes, key=self._above)
        lengths = [
            node.padded(self._multiple) if inner or not node.children
            else sum([below.padded(self._multiple) for below in preorder([node])])
            for node in ordered
        ]  # fmt: skip
        for start, stop in even_parts(lengths, self._options.segment_tokens):
            length = sum(lengths[start:stop])
            padded_length = length + self._options.missing(length)
            yield _Nodes(ordered[start:stop], inner, number, padded_length)

    def _add(self, added: _Nodes) -> None:
        """Adds an inner segment; its spans are made when `segments` is first read."""
        for number, node in enumerate(added.nodes):
            self._paths[id(node)] = (*self._above(node), Place(len(self._read), number))
        if added.nodes[0].common < 0:
            self.inner.append(added.nodes)
        self._read.append(added)

    def _above(self, node: Node) -> tuple[Place, ...]:
        parent = self._parents.get(id(node))
        return () if parent is None else self._paths[id(parent)]

    @functools.cached_property
    def nodes(self) -> list[_Nodes]:
        leaves = self._rounds.leaves()
        waves = (self._filled(self._trees(ends), key[0], inner=False) for key, ends in leaves)
        return [*heapq.merge(self._read, *waves, key=operator.attrgetter("round"))]

    @functools.cached_property
    def _places(self) -> list[int]:
        return [index for index, added in enumerate(self.nodes) if added.inner]

    def _parent(self, node: Node) -> Place | None:
        path = self._above(node)
        return Place(self._places[path[-1].segment], path[-1].number) if path else None

    @property
    def lengths(self) -> list[int]:
        return [added.length for added in self.nodes]

    @property
    def parents(self) -> list[set[int]]:
        above = ({*map(self._above, added.nodes)} for added in self.nodes)
        return [{self._places[path[-1].segment] for path in paths if path} for paths in above]

    @functools.cached_property
    def segments(self) -> list[Segment]:
        return [self._segment(index, added) for index, added in enumerate(self.nodes)]

    def _segment(self, index: int, added: _Nodes) -> Segment:
        if not added.inner and any(node.children for node in added.nodes):
            trees = itertools.groupby(added.nodes, self._parent)
            siblings = [([*nodes], parent) for parent, nodes in trees]
            return joined_segment(index, siblings, self._first, self._options)
        spans = tuple(node.span(self._multiple, self._parent(node)) for node in added.nodes)
        scored = added.scored
        if scored is None:
            scored = any(self._first[m] < span.end for span in spans for m in span.rollouts)
        if added.source < 0:
            spans = padded(spans, self._options, inner=added.inner)
        return Segment(spans, added.inner, scored, source=added.source)
