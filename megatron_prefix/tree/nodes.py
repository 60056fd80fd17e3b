"""Nodes of a prefix tree while it is built, and the even parts that they are cut into.  Pure."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from megatron_prefix.tree.forest import Place, Span, TreeOptions

_MEMBERS = operator.attrgetter("members")
"""Orders nodes without a common member: by their first ones, as those ascend."""


@dataclass(slots=True)
class Node:
    """Positions [start, end) of the rollouts `members`.

    `common`: its number among the spans that data-parallel ranks have in common (features/across),
    or -1. `joins`: it runs inside the waves that read it, with its descendants (joining.py).
    """

    start: int
    end: int
    members: list[int]
    children: list[Node] = field(default_factory=list)
    common: int = -1
    joins: bool = False

    def ending(self) -> list[int]:
        below = {member for child in self.children for member in child.members}
        return [member for member in self.members if member not in below]

    @property
    def saved(self) -> int:
        """Positions that are computed once here and not once more in every child."""
        below = sum([len(child.members) for child in self.children])
        copies = len(self.children) + (below < len(self.members))  # some end here
        return (copies - 1) * (self.end - self.start)

    def padded(self, align: int) -> int:
        return -(-(self.end - self.start) // align) * align

    def span(self, align: int, parent: Place | None) -> Span:
        length = self.end - self.start
        return Span(self.start, length, self.padded(align), tuple(self.members), parent)


def preorder(roots: Sequence[Node]) -> list[Node]:
    """Parents before children."""
    nodes, todo = [], [*reversed(roots)]
    while todo:
        nodes.append(node := todo.pop())
        if node.children:
            todo += node.children[::-1]
    return nodes


def forks(roots: Sequence[Node]) -> Iterator[Node]:
    """Those with children, parents first; the caller may replace the children of what it gets."""
    todo = [root for root in reversed(roots) if root.children]
    while todo:
        yield (node := todo.pop())
        todo += [child for child in reversed(node.children) if child.children]


def joins_waves(node: Node, options: TreeOptions) -> bool:
    """Whether a node may run inside the waves that read it: all inner nodes below it do, too, and
    with its descendants it takes at most half a segment."""
    if not options.joins or any(child.children and not child.joins for child in node.children):
        return False
    rows = sum([child.padded(options.multiple) for child in preorder([node])])
    return 2 * rows <= (options.segment_tokens or 2 * rows)


def even_parts(lengths: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Cuts a sequence into the fewest parts whose sums are at most `budget`, about equally long.

    Args:
        lengths: above 0; one longer than `budget` is a part of its own.
        budget: 0: no limit.

    Returns:
        (start, stop) of every part.
    """
    if not lengths:
        return []
    ends = [*itertools.accumulate(lengths)]
    if not budget or ends[-1] <= budget:
        return [(0, len(lengths))]
    parts, longest, _ = _filled_parts(ends, budget)
    low, high = -(-ends[-1] // len(parts)), min(longest, budget)
    while low < high:  # only sums that occur are tried
        middle = (low + high) // 2
        candidate, longest, next_budget = _filled_parts(ends, middle)
        if len(candidate) > len(parts):
            low = next_budget
        else:
            parts, high = candidate, min(longest, middle)
    return parts


def _filled_parts(ends: Sequence[int], budget: int) -> tuple[list[tuple[int, int]], int, int]:
    """Greedily filled parts, the largest of their sums, and the next budget that changes them."""
    parts, start, before, longest, next_budget = [], 0, 0, 0, ends[-1]
    while start < len(ends):
        stop = max(start + 1, bisect.bisect(ends, before + budget, start))
        parts.append((start, stop))
        longest = max(longest, ends[stop - 1] - before)
        if stop < len(ends):
            next_budget = min(next_budget, ends[stop] - before)
        start, before = stop, ends[stop - 1]
    return parts, longest, next_budget


def equal_bounds(start: int, end: int, longest: int, align: int) -> list[int]:
    """Bounds of the fewest nearly equal chunks, each at most `longest`, multiples of `align`."""
    if end <= start:
        return [start]
    num = -(-(end - start) // longest)
    units = -(-(end - start) // align)
    bounds = [start + align * (units * i // num) for i in range(num)]
    return [*bounds, end]


def dissolved(roots: list[Node], pays: Callable[[Node], bool]) -> list[Node]:
    """Merges inner nodes for which `pays` is false into their children, top down."""
    top = Node(0, 0, [], roots)
    for node in forks([top]):
        children, todo = node.children, list[Node]()
        if any(child.children and not pays(child) for child in children):
            children, todo = [], children[::-1]
        while todo:
            child = todo.pop()
            if not child.children or pays(child):
                children.append(child)
                continue
            for grandchild in child.children:
                grandchild.start = child.start
            ends_here = [Node(child.start, child.end, child.ending())] if child.ending() else []
            todo.extend(reversed([*ends_here, *child.children]))
        node.children = sorted(children, key=_MEMBERS)
    return top.children
