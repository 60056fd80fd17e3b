"""Nodes of a prefix tree while it is built.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from megatron_prefix.tree.forest import Place, Span


@dataclass
class Node:
    """Positions [start, end) of the rollouts `members`.

    `common` is its number among the spans that data-parallel ranks have in common
    (across_ranks.py); -1 if it is not one of them.
    """

    start: int
    end: int
    members: list[int]
    children: list[Node] = field(default_factory=list)
    common: int = -1

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


def dissolved(roots: list[Node], pays: Callable[[Node], bool]) -> list[Node]:
    """Merges inner nodes that do not pay into their children, top down."""
    top = Node(0, 0, [], roots)
    for node in preorder([top]):
        kept: list[Node] = []
        todo = list(reversed(node.children))
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
