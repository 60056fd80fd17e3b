"""The prefix trees of a rank that has spans in common with others.  Pure: numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_prefix.features.across.common_spans import CommonSpans
from megatron_prefix.tree.build import Tries, find_shared, worthwhile
from megatron_prefix.tree.forest import Pairs, TreeOptions
from megatron_prefix.tree.nodes import Node


def find_below(
    rollouts: Sequence[Pairs], options: TreeOptions, beginnings: Sequence[int], common: CommonSpans
) -> Tries:
    """Finds what this rank's rollouts share after the spans in common with other ranks.

    Args:
        rollouts: the step's, on this rank.
        beginnings: number of each rollout's beginning; see `common.beginnings_of`.
    """
    members: dict[int, list[int]] = {}
    for member, number in enumerate(beginnings):
        members.setdefault(common.below[number], []).append(member)
    ends = {number: common.spans[number].end if number >= 0 else 0 for number in members}
    trained = tuple(rollout.trained for rollout in rollouts)
    first = tuple(rollout.first_trained for rollout in rollouts)
    below = {
        number: worthwhile(rollouts, group, first, options, ends[number])
        for number, group in members.items()
    }
    tries = Tries((_tree_of(common, below),), trained, first, options, exchanged=common.exchanged())
    if not any(member.routes is not None for member in rollouts):
        return tries
    unrouted = find_shared(rollouts, options=options)
    return replace(tries, unshared_by_routes=unrouted.unshared_by_routes)


def _tree_of(common: CommonSpans, below: Mapping[int, list[Node]]) -> list[Node]:
    """The roots of one rank's tree: its common spans, and below them what it has for itself.

    Args:
        common: what the rank has in common with others.
        below: by common span (-1: above all of them) the roots of what continues it there.
    """
    children = {number: [*nodes] for number, nodes in below.items()}
    for number in reversed(range(len(common.spans))):  # children first
        span = common.spans[number]
        if common.rank not in span.ranks:
            continue
        under = sorted(children.pop(number), key=lambda child: child.members[0])
        members = sorted({member for child in under for member in child.members})
        node = Node(span.start, span.end, members, under, number)
        children.setdefault(span.parent, []).append(node)
    return sorted(children.get(-1, ()), key=lambda child: child.members[0])
