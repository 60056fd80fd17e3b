"""Prefix trees -> segments: what is small is packed, what is large is walked.  Pure.

A microbatch of a hundred tokens costs nearly what one of thousands costs. So small subtrees, of one
tree or of many, are put together into *bundles*. A bundle runs level by level: first the nodes that
others read, those of one depth packed into segments, then all its leaves, packed into waves. What
is too large for a bundle is walked depth first: a node alone, then what hangs below it.

Bundles bound memory: at most `_BUNDLE` segments' worth of positions wait for their backward, with
what lies above them, unless a depth-first walk with these segments needs more.

A backward waits for the losses of its microbatches. Where a subtree has parts of microbatches that
are far from one another, a walk would hold its leaves until the last of them is complete. Such a
node is *opened*: it runs when its first rollout needs it, and what hangs below it runs in the order
of the rollouts, among its siblings.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron_prefix.tree.forest import Place, Segment, Span, TreeOptions

_BUNDLE = 4
"""Largest bundle, in budgets of a segment, together with all nodes above it."""


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
        roots: of all trees of a step, in the order in which they are to run.
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
        # By identity of nodes: those that are opened, the positions of subtrees, places, parents.
        self._scattered = _scattered(roots, microbatch_of)
        self._rows: dict[int, int] = {}
        self._places: dict[int, Place] = {}
        self._parents: dict[int, Node] = {}
        for node in reversed(list(preorder(roots))):
            below = sum(self._rows[id(child)] for child in node.children)
            self._rows[id(node)] = node.padded(self._multiple) + below
            self._parents.update((id(child), node) for child in node.children)
        self._walk(roots)

    def _walk(self, roots: Sequence[Node]) -> None:
        """Goes through siblings in turn; what hangs below a node comes before its next sibling."""
        todo = list(reversed(self._split(roots, 0)))
        while todo:
            nodes, above = todo.pop()
            first = nodes[0]
            is_alone = len(nodes) == 1 and first.children
            if id(first) in self._scattered:
                self._add(nodes, inner=True)
            elif is_alone and self._rows[id(first)] > self._limit(above):
                self._add(nodes, inner=True)
                above += first.padded(self._multiple)
                todo.extend(reversed(self._split(first.children, above)))
            else:
                self._add_bundle(nodes)

    def _limit(self, above: int) -> int:
        """Most positions of a bundle below so many."""
        return max(self._budget, _BUNDLE * self._budget - above) if self._budget else sys.maxsize

    def _split(self, nodes: Sequence[Node], above: int) -> list[tuple[list[Node], int]]:
        """Siblings as bundles, and single nodes too large for one or opened, in their order.

        Args:
            nodes: siblings.
            above: positions of all nodes above them.
        """
        bundles: list[tuple[list[Node], int]] = []
        room = -1  # in the last bundle
        for node in self._in_turn(nodes):
            rows = self._rows[id(node)]
            if id(node) in self._scattered:
                bundles.append(([node], above))
                above += node.padded(self._multiple)
                room = -1
            elif rows > self._limit(above) and node.children:
                bundles.append(([node], above))
                room = -1
            elif room >= rows:
                bundles[-1][0].append(node)
                room -= rows
            else:
                bundles.append(([node], above))
                room = max(0, self._limit(above) - rows)
        return bundles

    def _in_turn(self, nodes: Sequence[Node]) -> list[Node]:
        """Siblings; if some of them are opened, the nodes that hang below these among the others,
        in the order of first rollouts, and an opened node in front of the first that needs it."""
        if not any(id(node) in self._scattered for node in nodes):
            return list(nodes)
        below: list[Node] = []
        opened: set[int] = set()
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if id(node) in self._scattered:
                todo.extend(node.children)
            else:
                below.append(node)
        in_turn: list[Node] = []
        for node in sorted(below, key=lambda node: node.members[0]):
            path = []
            above = self._parents.get(id(node))
            while above is not None and id(above) in self._scattered and id(above) not in opened:
                path.append(above)
                opened.add(id(above))
                above = self._parents.get(id(above))
            in_turn += [*reversed(path), node]
        return in_turn

    def _add_bundle(self, nodes: Sequence[Node]) -> None:
        """Inner nodes level by level, then all leaves.

        What hangs below one node is side by side in a segment, so that it is one run of queries.
        """
        nodes = sorted(nodes, key=self._path)
        level: Sequence[Node] = [node for node in nodes if node.children]
        while level:
            for spans in self._filled(level):
                self._add(spans, inner=True)
            level = [child for node in level for child in node.children if child.children]
        leaves = [node for node in preorder(nodes) if not node.children]
        for wave in self._filled(sorted(leaves, key=self._path)):
            self._add(wave, inner=False)

    def _filled(self, nodes: Sequence[Node]) -> Iterator[Sequence[Node]]:
        """Nodes in order as the fewest segments of about equal length."""
        lengths = [node.padded(self._multiple) for node in nodes]
        yield from (nodes[start:stop] for start, stop in even_parts(lengths, self._budget))

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


def _scattered(roots: Sequence[Node], microbatch_of: Sequence[int] | None) -> set[int]:
    """Inner nodes (by identity) with parts of microbatches, and others between those that they
    have."""
    if microbatch_of is None:
        return set()
    size = collections.Counter(microbatch_of)
    opened = set()
    for node in preorder(roots):
        inside = collections.Counter(microbatch_of[member] for member in node.members)
        parts = any(num < size[microbatch] for microbatch, num in inside.items())
        between = range(min(inside) + 1, max(inside))
        if node.children and parts and any(inside[m] < size[m] for m in between):
            opened.add(id(node))
    return opened


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
