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

from megatron_prefix.tree.forest import Place, Segment, TreeOptions
from megatron_prefix.tree.node import Node, preorder

_BUNDLE = 4
"""Largest bundle, in budgets of a segment, together with all nodes above it."""


def pack(
    roots: Sequence[Node],
    first_trained: Sequence[int],
    options: TreeOptions,
    microbatch_of: Sequence[int] | None = None,
) -> tuple[Segment, ...]:
    """The segments of trees, in F-order.

    Args:
        roots: of all trees of a step, in the order in which they are to run.
        first_trained: of every rollout.
        options: see TreeOptions.
        microbatch_of: the trainer's microbatch of every rollout (default: one rollout each).
    """
    packing = _Packing(roots, first_trained, options, microbatch_of)
    packing.run(roots)
    return tuple(packing.segments)


def inner_segments(
    roots: Sequence[Node],
    first_trained: Sequence[int],
    options: TreeOptions,
    microbatch_of: Sequence[int] | None = None,
) -> list[Sequence[Node]]:
    """The nodes of every inner segment that `pack` makes."""
    packing = _Packing(roots, first_trained, options, microbatch_of)
    packing.run(roots)
    return packing.inner


def _scattered(roots: Sequence[Node], microbatch_of: Sequence[int] | None) -> set[int]:
    """Inner nodes (by identity) with parts of microbatches, and others between those that they
    have."""
    if microbatch_of is None:
        return set()
    size = collections.Counter(microbatch_of)
    found = set()
    for node in preorder(roots):
        inside = collections.Counter(microbatch_of[member] for member in node.members)
        parts = any(num < size[microbatch] for microbatch, num in inside.items())
        between = range(min(inside) + 1, max(inside))
        if node.children and parts and any(inside[m] < size[m] for m in between):
            found.add(id(node))
    return found


class _Packing:
    """Segments under construction.

    Attributes:
        segments: so far.
        inner: the nodes of every inner segment.
        rows: per node (by identity) the positions of its subtree, padding included.
        places: per node where its span is.
        scattered: nodes that are opened.
    """

    def __init__(
        self,
        roots: Sequence[Node],
        first_trained: Sequence[int],
        options: TreeOptions,
        microbatch_of: Sequence[int] | None,
    ) -> None:
        self.scattered = _scattered(roots, microbatch_of)
        self.first, self.multiple = first_trained, options.multiple
        self.budget = options.segment_tokens
        self.rows: dict[int, int] = {}
        self.places: dict[int, Place] = {}
        self.parents: dict[int, Node] = {}
        self.segments: list[Segment] = []
        self.inner: list[Sequence[Node]] = []
        for node in reversed(list(preorder(roots))):
            below = sum(self.rows[id(child)] for child in node.children)
            self.rows[id(node)] = node.padded(self.multiple) + below
            self.parents.update((id(child), node) for child in node.children)

    def run(self, roots: Sequence[Node]) -> None:
        """Goes through siblings in turn; what hangs below a node comes before its next sibling."""
        todo = list(reversed(self._split(roots, 0)))
        while todo:
            nodes, above = todo.pop()
            if id(nodes[0]) in self.scattered:
                self._add(nodes, inner=True)
            elif len(nodes) == 1 and nodes[0].children and not self._fits(nodes[0], above):
                self._add(nodes, inner=True)
                above += nodes[0].padded(self.multiple)
                todo.extend(reversed(self._split(nodes[0].children, above)))
            else:
                self._add_bundle(nodes)

    def _limit(self, above: int) -> int:
        return max(self.budget, _BUNDLE * self.budget - above) if self.budget else sys.maxsize

    def _fits(self, node: Node, above: int) -> bool:
        return self.rows[id(node)] <= self._limit(above)

    def _split(self, nodes: Sequence[Node], above: int) -> list[tuple[list[Node], int]]:
        """Siblings as bundles, and single nodes too large for one or opened, in their order.

        Args:
            nodes: siblings.
            above: positions of all nodes above them.
        """
        found: list[tuple[list[Node], int]] = []
        room = -1  # in the last bundle
        for node in self._in_turn(nodes):
            rows = self.rows[id(node)]
            if id(node) in self.scattered:
                found.append(([node], above))
                above += node.padded(self.multiple)
                room = -1
            elif not self._fits(node, above) and node.children:
                found.append(([node], above))
                room = -1
            elif room >= rows:
                found[-1][0].append(node)
                room -= rows
            else:
                found.append(([node], above))
                room = max(0, self._limit(above) - rows)
        return found

    def _in_turn(self, nodes: Sequence[Node]) -> list[Node]:
        """Siblings; if some of them are opened, the nodes that hang below these among the others,
        in the order of first rollouts, and an opened node in front of the first that needs it."""
        if not any(id(node) in self.scattered for node in nodes):
            return list(nodes)
        below: list[Node] = []
        opened: set[int] = set()
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if id(node) in self.scattered:
                todo.extend(node.children)
            else:
                below.append(node)
        found: list[Node] = []
        for node in sorted(below, key=lambda node: node.members[0]):
            path = []
            above = self.parents.get(id(node))
            while above is not None and id(above) in self.scattered and id(above) not in opened:
                path.append(above)
                opened.add(id(above))
                above = self.parents.get(id(above))
            found += [*reversed(path), node]
        return found

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
        lengths = [node.padded(self.multiple) for node in nodes]
        yield from (nodes[start:stop] for start, stop in even_parts(lengths, self.budget))

    def _add(self, nodes: Sequence[Node], *, inner: bool) -> None:
        for number, node in enumerate(nodes):
            self.places[id(node)] = Place(len(self.segments), number)
        spans = tuple(node.span(self.multiple, self._above(node)) for node in nodes)
        scored = any(self.first[m] < span.end for span in spans for m in span.rollouts)
        self.segments.append(Segment(spans, inner, scored))
        if inner:
            self.inner.append(nodes)

    def _path(self, node: Node) -> list[Place]:
        """Where the nodes above one are, root first; all of them have a place."""
        found: list[Place] = []
        above = self.parents.get(id(node))
        while above is not None:
            found.append(self.places[id(above)])
            above = self.parents.get(id(above))
        return found[::-1]

    def _above(self, node: Node) -> Place | None:
        parent = self.parents.get(id(node))
        return None if parent is None else self.places[id(parent)]


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
