"""The forest of a plan from a file, and numbers of trees.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_prefix.plan.actions import Plan
from megatron_prefix.tree import Forest, Segment


def forest_of(plan: Plan) -> Forest:
    """The forest of a plan; it does not know which positions are trained."""
    lengths: dict[int, int] = {}
    for segment in plan.segments:
        for span in segment.spans:
            lengths.update(dict.fromkeys(span.rollouts, span.end))
    ends = tuple(lengths[rollout] for rollout in sorted(lengths))
    return Forest(plan.segments, ends, tuple(end - 1 for end in ends))


def max_depth(forest: Forest) -> int:
    """Most spans on a path from a root to a leaf."""
    return max(map(len, forest.paths), default=0)


def num_trees(segments: Sequence[Segment]) -> int:
    """A rollout that shares nothing is a tree, too."""
    spans = (span for segment in segments for span in segment.spans)
    return sum(span.parent is None and bool(span.rollouts) for span in spans)


def trees(segments: Sequence[Segment]) -> list[tuple[int, ...]]:
    """Per segment the tree number of every span; trees are numbered in the order of their roots."""
    tree_of: list[tuple[int, ...]] = []
    num_trees = 0
    for index, segment in enumerate(segments):
        numbers: list[int] = []
        for span in segment.spans:
            if span.parent is None:
                numbers.append(num_trees)
                num_trees += 1
            else:
                where, number = span.parent
                numbers.append((numbers if where == index else tree_of[where])[number])
        tree_of.append(tuple(numbers))
    return tree_of
