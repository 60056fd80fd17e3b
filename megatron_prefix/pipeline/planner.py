"""Segments -> two orders -> one program a rank.  Pure.

F-order is depth first over all trees of the step; in B-order a segment comes after all its
descendants.  Both are the same on every stage, so the messages between two neighbours in one
direction are a FIFO, and no plan made here can deadlock ("Schedule-Level Shared-Prefix Reuse for LLM
RL Training", section 4.5, reorders phases stage by stage for flat groups; here for any tree).
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_prefix.pipeline.actions import Action, Plan
from megatron_prefix.tree import Forest, Segment


def backward_order(segments: Sequence[Segment]) -> list[int]:
    """B-order: the postorder of the trees whose preorder is F-order."""
    order: list[int] = []
    path: list[int] = []
    for index, segment in enumerate(segments):
        while path and path[-1] != segment.parent:
            order.append(path.pop())
        path.append(index)
    return order + path[::-1]


def closings(forest: Forest, microbatches: Sequence[int] | None = None) -> list[int]:
    """Per segment the last forward (in F-order) without which its backward cannot run.

    A microbatch of the trainer can be scored only when the last of its rollouts has been through
    its last segment, and every scored segment on the way waits for that.

    Args:
        forest: the step's segments.
        microbatches: the trainer's microbatch of each rollout (default: one rollout each).
    """
    owner = range(len(forest.num_positions)) if microbatches is None else microbatches
    last: dict[int, int] = {}
    for rollout, path in enumerate(forest.paths):
        last[owner[rollout]] = max(last.get(owner[rollout], 0), path[-1][0])
    return [
        max([index, *(last[owner[m]] for row in segment.rows for m in row.rollouts if segment.scored)])
        for index, segment in enumerate(forest.segments)
    ]


def make_plan(
    forest: Forest,
    num_ranks: int = 1,
    *,
    microbatches: Sequence[int] | None = None,
    extra: int = 2,
) -> Plan:
    """The program of every rank: warm-up, one backward one forward, drain.

    Before its j-th backward a stage has run the forwards that this backward (or an earlier one)
    cannot do without, and `extra` more for each stage behind it.

    Args:
        forest: the step's segments.
        num_ranks: pipeline size.
        microbatches: see `closings`.
        extra: forwards that a stage runs ahead of its successor; 2 hides uneven segments, 1 holds
            less memory.
    """
    order, needed = backward_order(forest.segments), closings(forest, microbatches)
    num = len(forest.segments)
    programs = []
    for rank in range(num_ranks):
        ahead = extra * (num_ranks - 1 - rank)
        program: list[Action] = []
        done = least = 0
        for index in order:
            least = max(least, needed[index] + 1)
            upto = min(num, least + ahead)
            program += [Action("F", forward) for forward in range(done, upto)]
            program.append(Action("B", index))
            done = max(done, upto)
        programs.append(tuple(program))
    return Plan(forest.segments, tuple(programs))
