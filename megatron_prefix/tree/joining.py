"""A span and what continues it in one segment, where a round of microbatches has room.  Pure.

In every layer a suffix reads keys that the segment itself has just made, so one forward runs all of
a round, as peers do within a packed microbatch ("DualKV", section 3). A segment costs what some
positions cost: what several rounds need runs in each of them where that is cheaper than a segment
of its own.  That is chosen for a whole step (`joined_segments`), or for what few positions of
rollouts share behind their prompts (`joins_waves` of nodes.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megatron_prefix.tree.forest import Place, Segment, Span, TreeOptions, joined_of, padded
from megatron_prefix.tree.nodes import Node, dissolved, preorder

_STEPS = 16
"""Rounds are made about equally long, and shorter where they do not fit, in such parts of a
segment."""


def joined_segments(
    roots: Sequence[Node],
    first_trained: Sequence[int],
    options: TreeOptions,
    owner: Sequence[int],
    longest: int,
) -> list[Segment] | None:
    """Segments of whole microbatches, each with everything that its rollouts need; None if a
    microbatch is longer than a segment.

    Args:
        roots: of all trees of a step; they stay as they are.
        first_trained: of every rollout.
        options: see TreeOptions.
        owner: the trainer's microbatch of every rollout.
        longest: most positions in a segment.
    """
    paths: list[list[Node]] = [[] for _ in first_trained]
    needs: dict[int, dict[int, int]] = {one: {} for one in sorted({*owner})}
    for node in preorder(roots):
        rows = node.padded(options.multiple)
        for member in node.members:
            paths[member].append(node)
            needs[owner[member]][id(node)] = rows
    budget = longest
    while rounds := _rounds(needs, budget):
        round_of = {one: number for number, some in enumerate(rounds) for one in some}
        rollouts: list[list[int]] = [[] for _ in rounds]
        for rollout, microbatch in enumerate(owner):
            rollouts[round_of[microbatch]].append(rollout)
        segments = [
            joined_segment(index, [(trees_of(some, paths, options), None)], first_trained, options)
            for index, some in enumerate(rollouts)
        ]
        # What too few of a round have in common to be worth a span is there several times.
        over = max(segment.padded_length for segment in segments) - longest
        if over <= 0:
            return segments
        budget -= max(over, longest // _STEPS + 1)
    return None


def most_alive(lengths: Sequence[int], parents: Sequence[Iterable[int]]) -> int:
    """Most positions that a forward computes or keeps for others, of segments in F-order.

    Args:
        lengths: of every segment.
        parents: of every segment the others that it reads.
    """
    last = [*range(len(lengths))]
    for index in reversed(range(len(lengths))):
        for parent in parents[index]:
            last[parent] = max(last[parent], last[index])
    return max(
        sum(lengths[other] for other in range(index + 1) if last[other] >= index)
        for index in range(len(lengths))
    )


def _rounds(needs: Mapping[int, Mapping[int, int]], longest: int) -> list[list[int]] | None:
    """Microbatches in order, in the fewest rounds that fit, about equally long; None if one does
    not fit by itself.

    Args:
        needs: of every microbatch, in order, the positions of every node.
        longest: most positions in a round.
    """
    low, high = max(sum(one.values()) for one in needs.values()) - 1, longest
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
    """Rounds filled one after the other."""
    rounds: list[list[int]] = []
    here: set[int] = set()
    size = 0
    for microbatch, mine in needs.items():
        more = sum(rows for node, rows in mine.items() if node not in here)
        if not rounds or size + more > budget:
            rounds.append([])
            here, size, more = set(), 0, sum(mine.values())
        rounds[-1].append(microbatch)
        here |= mine.keys()
        size += more
    return rounds


def trees_of(
    rollouts: Iterable[int],
    paths: Sequence[Sequence[Node]] | Mapping[int, Sequence[Node]],
    options: TreeOptions,
) -> list[Node]:
    """The trees of some rollouts, of what several of them need, each with the nodes of its path."""
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
    """All nodes of some trees, which continue spans of other segments, or none: siblings, and then
    what is below each of them. What reads is behind what it reads, and all that reads one span is
    in one piece: every key is in a level once."""
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
    scored = any(first_trained[one] < span.end for span in spans for one in span.rollouts)
    whole = padded(tuple(spans), options, inner=joined >= 0)
    return Segment(whole, joined >= 0, scored, joined=joined)
