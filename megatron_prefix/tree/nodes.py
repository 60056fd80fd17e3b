"""Nodes of a prefix tree while it is built, and the even parts that they are cut into.  Pure."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from megatron_prefix.tree.forest import Place, Span, TreeOptions


@dataclass(slots=True)
class Node:
    """Positions [start, end) of the rollouts `members`.

    `common` is its number among the spans that data-parallel ranks have in common
    (common_spans.py); -1 if it is not one of them. `joins`: it runs in the waves that read it, with
    all that is below it (joining.py).
    """

    start: int
    end: int
    members: list[int]
    children: list[Node] = field(default_factory=list)
    common: int = -1
    joins: bool = False

    def ending(self) -> list[int]:
        """Members that end here: no child continues them."""
        below = {member for child in self.children for member in child.members}
        return [member for member in self.members if member not in below]

    @property
    def saved(self) -> int:
        """Positions that are computed once here and not once more in every child."""
        below = sum(len(child.members) for child in self.children)
        copies = len(self.children) + (below < len(self.members))  # some end here
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
    todo = [*reversed(roots)]
    while todo:
        yield (node := todo.pop())
        if node.children:
            todo += node.children[::-1]


def joins_waves(node: Node, options: TreeOptions) -> bool:
    """Whether a node that few others read may run in each wave that reads it: the waves then have
    all that is below it, and room for it."""
    if not options.joins or any(one.children and not one.joins for one in node.children):
        return False
    rows = sum(one.padded(options.multiple) for one in preorder([node]))
    return 2 * rows <= (options.segment_tokens or 2 * rows)


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
    ends = [*itertools.accumulate(lengths)]
    if not budget or ends[-1] <= budget:
        return [(0, len(lengths))]
    parts, longest, _ = _parts(ends, budget)
    low, high = -(-ends[-1] // len(parts)), min(longest, budget)
    while low < high:  # only sums that occur are tried
        middle = (low + high) // 2
        some, longest, more = _parts(ends, middle)
        if len(some) > len(parts):
            low = more
        else:
            parts, high = some, min(longest, middle)
    return parts


def _parts(ends: Sequence[int], budget: int) -> tuple[list[tuple[int, int]], int, int]:
    """Parts filled one after the other, of things that end there, the largest of their sums, and
    the least budget above this one with which they would be others."""
    parts, start, before, longest, more = [], 0, 0, 0, ends[-1]
    while start < len(ends):
        stop = max(start + 1, bisect.bisect(ends, before + budget, start))
        parts.append((start, stop))
        longest = max(longest, ends[stop - 1] - before)
        if stop < len(ends):
            more = min(more, ends[stop] - before)
        start, before = stop, ends[stop - 1]
    return parts, longest, more


def equal_bounds(start: int, end: int, longest: int, align: int) -> list[int]:
    """Bounds of the fewest nearly equal chunks, each at most `longest`, multiples of `align`."""
    if end <= start:
        return [start]
    num = -(-(end - start) // longest)
    units = -(-(end - start) // align)
    bounds = [start + align * (units * i // num) for i in range(num)]
    return [*bounds, end]


def dissolved(roots: list[Node], pays: Callable[[Node], bool]) -> list[Node]:
    """Merges inner nodes that do not pay into their children, top down."""
    top = Node(0, 0, [], roots)
    for node in preorder([top]):
        if not node.children:
            continue
        kept, todo = node.children, list[Node]()
        if not all(not child.children or pays(child) for child in kept):
            kept, todo = [], kept[::-1]
        while todo:
            child = todo.pop()
            if not child.children or pays(child):
                kept.append(child)
                continue
            for grandchild in child.children:
                grandchild.start = child.start
            ends_here = [Node(child.start, child.end, child.ending())] if child.ending() else []
            todo.extend(reversed([*ends_here, *child.children]))
        node.children = sorted(kept, key=lambda child: child.members[0])
    return top.children
