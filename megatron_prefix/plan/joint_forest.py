"""Pipelines whose ranks meet in every action: what runs side by side.  [pure]

Ranks that share experts exchange tokens in every expert layer, and a backward returns gradients to
the ranks whose tokens came in the forward.  So the segments that go forward side by side must go
backward side by side, on every stage.  The forests of such ranks are laid on top of one another,
tree on tree and child on child: the union is one forest, any plan of it is a plan for all, and
where a forest has no segment a filler takes its place, which is padding and stands for nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_prefix.tree import Forest, Segment, Span

_Node = tuple[int | None, ...]
"""Per forest the segment at one place of the union, if it has one there."""


@dataclass(frozen=True)
class JointForest:
    """A rank's segments among those that run beside them.

    Attributes:
        forest: the rank's own, with fillers.
        microbatch_of: the trainer's microbatch of each of its rollouts.
        union: all forests as one; rollouts of each are numbered after those of the forests before
            it, and so are microbatches unless the forests are ordered.
        union_microbatch_of: of the union, the microbatch of each rollout.
        lengths: per place the rows of every forest's segment.
    """

    forest: Forest
    microbatch_of: tuple[int, ...]
    union: Forest
    union_microbatch_of: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]

    @property
    def even(self) -> bool:
        """Whether what runs side by side is equally long on all ranks."""
        return all(len(set(rows)) == 1 for rows in self.lengths)


def joint_forest(
    forests: Sequence[Forest], microbatches_of: Sequence[Sequence[int]], place: int = 0
) -> JointForest:
    """Lays forests on top of one another; a forest alone is its own union.

    Args:
        forests: the segments of every pipeline.
        microbatches_of: of each the trainer's microbatch of every rollout.
        place: of the rank's own pipeline among them.
    """
    nodes, parents = _overlay(forests)
    filled = [_filled(forest, nodes, place) for place, forest in enumerate(forests)]
    union = []
    rollouts = [0, *itertools.accumulate(len(forest.num_positions) for forest in forests)]
    for index, parent in enumerate(parents):
        here = [forest.segments[index] for forest in filled]
        rows = [
            span._replace(rollouts=tuple(first + rollout for rollout in span.rollouts))
            for first, segment in zip(rollouts, here, strict=False)
            for span in segment.spans
        ]
        flags = (any(column) for column in zip(*(s[3:] for s in here), strict=True))
        union.append(Segment(parent, here[0].tree, tuple(rows), *flags))
    ordered = any(forest.ordered for forest in forests)
    return JointForest(
        filled[place],
        tuple(microbatches_of[place]),
        Forest(
            tuple(union),
            tuple(number for forest in forests for number in forest.num_positions),
            tuple(number for forest in forests for number in forest.first_trained),
            forests[place].align,
            ordered,
        ),
        tuple(_numbered(microbatches_of, ordered)),
        tuple(
            tuple(f.segments[index].padded_length for f in filled) for index in range(len(nodes))
        ),
    )


def _numbered(microbatches_of: Sequence[Sequence[int]], ordered: bool) -> Iterator[int]:
    """Microbatches of the union; where losses need all before them, equal numbers are one."""
    first = 0
    for microbatch_of in microbatches_of:
        yield from (first + microbatch for microbatch in microbatch_of)
        first += 0 if ordered else max(microbatch_of, default=-1) + 1


def _overlay(forests: Sequence[Forest]) -> tuple[list[_Node], list[int]]:
    """Places of the union in F-order, and their parents; the k-th children are one place."""
    children: list[dict[int, list[int]]] = []
    for forest in forests:
        below: dict[int, list[int]] = {}
        for index, segment in enumerate(forest.segments):
            below.setdefault(segment.parent, []).append(index)
        children.append(below)

    def under(node: _Node) -> list[_Node]:
        pairs = zip(children, node, strict=True)
        lists = [below.get(index, []) if index is not None else [] for below, index in pairs]
        return list(itertools.zip_longest(*lists))

    nodes: list[_Node] = []
    parents: list[int] = []
    waiting = [(node, -1) for node in reversed(under((-1,) * len(forests)))]
    while waiting:
        node, parent = waiting.pop()
        waiting += [(child, len(nodes)) for child in reversed(under(node))]
        nodes.append(node)
        parents.append(parent)
    return nodes, parents


def _filled(forest: Forest, nodes: Sequence[_Node], place: int) -> Forest:
    """One of the forests with fillers where it has no segment."""
    tree = max((segment.tree for segment in forest.segments), default=-1) + 1
    row = Span(0, 0, forest.align, ())
    filler = Segment(-1, tree, (row,), inner=False, extends=False, scored=False)
    new = {node[place]: index for index, node in enumerate(nodes)} | {-1: -1}
    segments = []
    for node in nodes:
        index = node[place]
        segment = filler if index is None else forest.segments[index]
        segments.append(segment._replace(parent=new[segment.parent]))
    return replace(forest, segments=tuple(segments))
