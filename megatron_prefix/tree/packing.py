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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from megatron_prefix.tree.forest import Place, Segment, Span, TreeOptions


@dataclass
class Node:
    """Positions [start, end) of the rollouts `members`."""

    start: int
    end: int
    members: list[int]
    children: list[Node] = field(default_factory=list)

    def ending(self) -> list[int]:
        """Members that end here: no child continues them."""
        below = {member for child in self.children for member in child.members}
        return [member for member in self.members if member not in below]

    @property
    def saved(self) -> int:
        """Positions that are computed once here and not once more in every child."""
        copies = len(self.children) + bool(self.ending())
        return (copies - 1) * (self.end - self.start)

    def padded(self, align: int) -> int:
        """Its positions, rounded up to a multiple of `align`."""
        return -(-(self.end - self.start) // align) * align

    def span(self, align: int, parent: Place | None) -> Span:
        """The node as a span below `parent`."""
        length = self.end - self.start
        return Span(self.start, length, self.padded(align), tuple(self.members), parent)


def preorder(roots: Sequence[Node]) -> Iterator[Node]:
    """Parents before children. The caller may change a node's children when it gets the node."""
    todo = list(reversed(roots))
    while todo:
        node = todo.pop()
        yield node
        todo.extend(reversed(node.children))


class Packing:
    """The segments of trees.

    Args:
        roots: of all trees of a step.
        first_trained: of every rollout.
        options: see TreeOptions.
        microbatch_of: the trainer's microbatch of every rollout; None: one rollout each.

    Attributes:
        segments: in F-order.
        inner: the nodes of every inner segment.
    """

    def __init__(
        self,
        roots: Sequence[Node],
        first_trained: Sequence[int],
        options: TreeOptions,
        microbatch_of: Sequence[int] | None = None,
    ) -> None:
        self.segments: list[Segment] = []
        self.inner: list[Sequence[Node]] = []
        self._first, self._multiple = first_trained, options.multiple
        self._budget = options.segment_tokens
        # By identity of nodes, so none of them may be gone before the end.
        self._parts: list[Node] = []
        self._places: dict[int, Place] = {}
        self._parents: dict[int, Node] = {}
        owner = range(len(first_trained)) if microbatch_of is None else microbatch_of
        rounds = _Rounds(self._inner(roots), _leaves(roots), owner, options)
        for together in rounds.together():
            levels: dict[int, list[Node]] = collections.defaultdict(list)
            for depth, node in itertools.chain(*(rounds.inner[number] for number in together)):
                levels[depth].append(node)
            for depth in sorted(levels):
                self._fill(levels[depth], inner=True)
            for number in together:
                self._fill(rounds.lasting[number], inner=False)
                self._fill([self._part(*part) for part in rounds.leaves[number]], inner=False)

    def _inner(self, roots: Sequence[Node]) -> Iterator[tuple[int, Node]]:
        """The nodes that others read, each with the number of nodes above it, level by level."""
        here = [node for node in roots if node.children]
        for depth in itertools.count():
            if not here:
                return
            yield from ((depth, node) for node in here)
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

        What hangs below one node is side by side, so that it is one run of queries.
        """
        nodes = sorted(nodes, key=self._path)
        lengths = [node.padded(self._multiple) for node in nodes]
        for start, stop in even_parts(lengths, self._budget):
            self._add(nodes[start:stop], inner=inner)

    def _add(self, nodes: Sequence[Node], *, inner: bool) -> None:
        for number, node in enumerate(nodes):
            self._places[id(node)] = Place(len(self.segments), number)
        parents = [self._parents.get(id(node)) for node in nodes]
        spans = tuple(
            node.span(self._multiple, None if parent is None else self._places[id(parent)])
            for node, parent in zip(nodes, parents, strict=True)
        )
        scored = any(self._first[m] < span.end for span in spans for m in span.rollouts)
        self.segments.append(Segment(spans, inner, scored))
        if inner:
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


class _Rounds:
    """Which microbatches run together.

    Args:
        inner: nodes that others read, each with the number of nodes above it.
        leaves: the others.
        owner: the microbatch of every rollout.
        options: see TreeOptions.

    Attributes:
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
    ) -> None:
        self._owner, self._multiple, self._budget = owner, options.multiple, options.segment_tokens
        inner = [*inner]
        rows = self._rows(node for _, node in inner), self._rows(leaves)
        rounds = list(self._rounds(sorted({*owner}), *rows))
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
        """Rounds whose inner nodes run together: those that have a segment of them at most."""
        start, rows = 0, 0
        for number, nodes in enumerate(self.inner):
            new = sum(node.padded(self._multiple) for _, node in nodes)
            if number > start and 0 < self._budget < rows + new:
                yield range(start, number)
                start, rows = number, 0
            rows += new
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
        inner: collections.Counter[int],
        leaves: collections.Counter[int],
    ) -> Iterator[Sequence[int]]:
        """Microbatches in order, as many a round as fit, about equally many positions in each.

        One that adds more than half a segment of inner nodes begins a round: they would live at
        once with those of the microbatches before it.
        """
        begins = [
            place
            for place, one in enumerate(microbatches)
            if not place or 0 < self._budget < 2 * inner[one]
        ]
        for start, stop in itertools.pairwise([*begins, len(microbatches)]):
            run = microbatches[start:stop]
            for low, high in even_parts([max(1, leaves[one]) for one in run], self._budget):
                yield run[low:high]


def even_parts(lengths: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Cuts a sequence into the fewest parts whose sums are at most `budget`, about equally long.

    Args:
        lengths: of the things, above 0; one longer than `budget` is a part of its own.
        budget: 0: no limit.

    Returns:
        (start, stop) of every part.
    """
    if not lengths:
        return []
    if not budget:
        return [(0, len(lengths))]
    fewest = len(_parts(lengths, budget))
    low, high = min(-(-sum(lengths) // fewest), budget), budget
    while low < high:
        middle = (low + high) // 2
        if len(_parts(lengths, middle)) > fewest:
            low = middle + 1
        else:
            high = middle
    return _parts(lengths, high)


def _parts(lengths: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Parts filled one after the other."""
    bounds, total = [0], 0
    for number, length in enumerate(lengths):
        if total and total + length > budget:
            bounds.append(number)
            total = 0
        total += length
    return [*zip(bounds, [*bounds[1:], len(lengths)], strict=True)]
