"""One plan for pipelines whose ranks share experts.  [pure]

Ranks that share experts exchange tokens in every expert layer: a backward returns gradients to the
ranks whose tokens came in the forward. So segments that run forward together must run backward
together, on every stage. The forests of these ranks are merged, k-th tree with k-th tree, k-th
child with k-th child. The union is one forest and its plan is a plan for all ranks. Where a rank's
forest has no segment, it gets a filler, which is only padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_prefix.tree import Forest, Segment, Span

_Node = tuple[int | None, ...]
"""Per forest the segment at one place of the union; None: it has none there."""


@dataclass(frozen=True)
class JointForest:
    """A rank's forest, and its union with those of ranks that run together with it.

    Attributes:
        forest: the rank's own, with fillers.
        microbatch_of: the trainer's microbatch of each of its rollouts.
        union: all forests as one; rollouts are numbered on from one forest to the next, and so are
            microbatches unless the forests are ordered.
        union_microbatch_of: the microbatch of each rollout of the union.
        lengths: per place of the union the positions of every forest's segment.
    """

    forest: Forest
    microbatch_of: tuple[int, ...]
    union: Forest
    union_microbatch_of: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]

    @property
    def even(self) -> bool:
        """Whether segments that run together are equally long on all ranks."""
        return all(len(set(lengths)) == 1 for lengths in self.lengths)


def joint_forest(
    forests: Sequence[Forest], microbatches_of: Sequence[Sequence[int]], place: int = 0
) -> JointForest:
    """Merges forests; a forest alone is its own union.

    Args:
        forests: one a pipeline.
        microbatches_of: per forest the trainer's microbatch of every rollout.
        place: number of the rank's own pipeline.
    """
    nodes, parents = _overlay(forests)
    filled = [_filled(forest, nodes, place) for place, forest in enumerate(forests)]
    union = []
    rollouts = [0, *itertools.accumulate(len(forest.num_positions) for forest in forests)]
    for index, parent in enumerate(parents):
        here = [forest.segments[index] for forest in filled]
        spans = [
            span._replace(rollouts=tuple(first + rollout for rollout in span.rollouts))
            for first, segment in zip(rollouts, here, strict=False)
            for span in segment.spans
        ]
        flags = (any(column) for column in zip(*(s[3:] for s in here), strict=True))
        union.append(Segment(parent, here[0].tree, tuple(spans), *flags))
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
    """Microbatches of the union; in ordered forests equal numbers are the same microbatch."""
    first = 0
    for microbatch_of in microbatches_of:
        yield from (first + microbatch for microbatch in microbatch_of)
        first += 0 if ordered else max(microbatch_of, default=-1) + 1


def _overlay(forests: Sequence[Forest]) -> tuple[list[_Node], list[int]]:
    """Places of the union in F-order, and their parents; k-th children share a place."""
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
    """One of the forests, with fillers where it has no segment."""
    tree = max((segment.tree for segment in forest.segments), default=-1) + 1
    padding = Span(0, 0, forest.align, ())
    filler = Segment(-1, tree, (padding,), inner=False, extends=False, scored=False)
    new = {node[place]: index for index, node in enumerate(nodes)} | {-1: -1}
    segments = []
    for node in nodes:
        index = node[place]
        segment = filler if index is None else forest.segments[index]
        segments.append(segment._replace(parent=new[segment.parent]))
    return replace(forest, segments=tuple(segments))
