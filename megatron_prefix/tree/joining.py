"""A span and its continuations in one segment, where a round of microbatches has room.  Pure.

In every layer a suffix reads keys that the same segment has just computed, so one forward runs a
whole round, as peers do within a packed microbatch ("DualKV", section 3). A segment has a fixed
cost, so a span that several rounds read may be cheaper in each of them than in a segment of its
own. `joined_segments` decides that for a whole step, `joins_waves` of nodes.py for single spans.
"""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence

from megatron_prefix.tree.forest import Place, Segment, Span, TreeOptions, joined_of, padded
from megatron_prefix.tree.nodes import Node, dissolved, preorder

_STEPS = 16
"""The length of rounds is searched in steps of this fraction of a segment."""


def joined_segments(
    roots: Sequence[Node],
    first_trained: Sequence[int],
    options: TreeOptions,
    owner: Sequence[int],
    longest: int,
) -> list[Segment] | None:
    """Segments of whole microbatches with all spans of their rollouts; None if a microbatch is
    longer than a segment.

    Args:
        roots: of all trees of a step; not changed.
    """
    paths: list[list[Node]] = [[] for _ in first_trained]
    needs: dict[int, dict[int, int]] = {microbatch: {} for microbatch in sorted({*owner})}
    for node in preorder(roots):
        rows = node.padded(options.multiple)
        for member in node.members:
            paths[member].append(node)
            needs[owner[member]][id(node)] = rows
    budget = longest
    while rounds := _rounds(needs, budget):
        round_of = {
            microbatch: number for number, members in enumerate(rounds) for microbatch in members
        }
        rollouts: list[list[int]] = [[] for _ in rounds]
        for rollout, microbatch in enumerate(owner):
            rollouts[round_of[microbatch]].append(rollout)
        segments = [
            joined_segment(
                index, [(trees_of(members, paths, options), None)], first_trained, options
            )
            for index, members in enumerate(rollouts)
        ]
        # Spans too short to share are repeated per rollout, so a segment may exceed its budget.
        over = max(segment.padded_length for segment in segments) - longest
        if over <= 0:
            return segments
        budget -= max(over, longest // _STEPS + 1)
    return None


def most_alive(lengths: Sequence[int], parents: Sequence[Iterable[int]]) -> int:
    """The most positions alive during a forward: its own, and those that later segments read.

    Args:
        lengths: of every segment, in F-order.
        parents: per segment the others that it reads.
    """
    last = [*range(len(lengths))]
    for index in reversed(range(len(lengths))):
        for parent in parents[index]:
            last[parent] = max(last[parent], last[index])
    ended = collections.Counter[int]()
    for length, index in zip(lengths, last, strict=True):
        ended[index] += length
    alive = itertools.accumulate(lengths)
    freed = itertools.accumulate((ended[index] for index in range(len(lengths))), initial=0)
    return max(map(operator.sub, alive, freed))


def _rounds(needs: Mapping[int, Mapping[int, int]], longest: int) -> list[list[int]] | None:
    """Microbatches in the fewest rounds of at most `longest` positions, about equally long; None if
    a microbatch is longer. `needs`: per microbatch, in order, positions by node."""
    low, high = max(sum(rows.values()) for rows in needs.values()) - 1, longest
    if low >= high:
        return None
    rounds = _cut(needs, high)
    while high - low > longest // _STEPS + 1:
        middle = (low + high) // 2
        fewer = _cut(needs, middle)
        low, high = (middle, high) if len(fewer) > len(rounds) else (low, middle)
        rounds = rounds if len(fewer) > len(rounds) else fewer
    return rounds


def _cut(needs: Mapping[int, Mapping[int, int]], budget: int) -> list[list[int]]:
    rounds: list[list[int]] = []
    nodes: set[int] = set()
    size = 0
    for microbatch, rows_of in needs.items():
        added = sum(rows for node, rows in rows_of.items() if node not in nodes)
        if not rounds or size + added > budget:
            rounds.append([])
            nodes, size, added = set(), 0, sum(rows_of.values())
        rounds[-1].append(microbatch)
        nodes |= rows_of.keys()
        size += added
    return rounds


def trees_of(
    rollouts: Iterable[int],
    paths: Sequence[Sequence[Node]] | Mapping[int, Sequence[Node]],
    options: TreeOptions,
) -> list[Node]:
    """The trees of a subset of rollouts, made of their paths; nodes that save too little there are
    dissolved."""
    copies: dict[int, Node] = {}
    roots: list[Node] = []
    for rollout in rollouts:
        siblings = roots
        for node in paths[rollout]:
            copy = copies.get(id(node))
            if copy is None:
                copy = copies[id(node)] = Node(node.start, node.end, [])
                siblings.append(copy)
            copy.members.append(rollout)
            siblings = copy.children
    return dissolved(roots, lambda node: node.saved >= max(1, options.min_gain))


def joined_segment(
    index: int,
    trees: Sequence[tuple[Sequence[Node], Place | None]],
    first_trained: Sequence[int],
    options: TreeOptions,
) -> Segment:
    """One segment of whole trees, each with the span of another segment that it continues, or None.

    Siblings are neighbours and come after their parent, so each key is in a level once.
    """
    spans: list[Span] = []
    todo = [*reversed(trees)]
    while todo:
        siblings, parent = todo.pop()
        first = len(spans)
        spans += [node.span(options.multiple, parent) for node in siblings]
        todo += [
            (node.children, Place(index, first + number))
            for number, node in reversed([*enumerate(siblings)])
            if node.children
        ]
    joined = joined_of(index, spans)
    scored = any(first_trained[rollout] < span.end for span in spans for rollout in span.rollouts)
    padded_spans = padded(tuple(spans), options, inner=joined >= 0)
    return Segment(padded_spans, joined >= 0, scored, joined=joined)
