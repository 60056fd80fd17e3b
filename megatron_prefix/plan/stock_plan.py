"""What Megatron's own schedule runs on the trainer's microbatches, as a plan.  Pure."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.tree import Forest, Segment, Span

OVER_STOCK, LEAST_OVER = 0.05, 0.5 * 2**30
"""What a step may take beyond Megatron's own: a share of its peak, weights and gradients included,
and no less than so many bytes, which nobody misses."""


def limit_of(stock: float, static: float) -> float:
    """Bytes besides weights and gradients that a step may take.

    Args:
        stock: what the stock schedule takes, likewise.
        static: bytes of weights and gradients.
    """
    return stock + max(OVER_STOCK * (stock + static), LEAST_OVER)


def heaviest_stock_plan(
    forest: Forest, microbatch_of: Sequence[int], num_ranks: int = 1, num_chunks: int = 1
) -> Plan:
    """One forward one backward over the neighbouring microbatches with the most positions.

    As many as a pipeline holds at once, and as many again (with virtual stages all of them), so its
    peak of memory is that of the whole step. The padding that trainers give microbatches does not
    count.

    Args:
        forest: of the step; its segments are not looked at.
        microbatch_of: the trainer's microbatch of every rollout.
        num_ranks: pipeline size.
        num_chunks: model chunks a rank.
    """
    rollouts = collections.defaultdict(list)
    for rollout, microbatch in enumerate(microbatch_of):
        rollouts[microbatch].append(rollout)
    sums = [sum(forest.num_positions[r] for r in rollouts[one]) for one in sorted(rollouts)]
    held = len(sums) if num_chunks > 1 else 2 * num_ranks if num_ranks > 1 else 1
    num = min(len(sums), held)
    start = max(range(len(sums) - num + 1), key=lambda begin: sum(sums[begin : begin + num]))
    segments: list[Segment] = []
    owners: list[int] = []
    for number, microbatch in enumerate(sorted(rollouts)[start : start + num]):
        spans = []
        for rollout in rollouts[microbatch]:
            length = forest.num_positions[rollout]
            padded = -(-length // forest.multiple) * forest.multiple
            spans.append(Span(0, length, padded, (len(owners),)))
            owners.append(number)
        segments.append(Segment(tuple(spans), inner=False, scored=True))
    lengths = tuple(span.length for segment in segments for span in segment.spans)
    last = tuple(length - 1 for length in lengths)
    part = Forest(tuple(segments), lengths, last, forest.multiple)
    return make_plan(part, num_ranks, num_chunks=num_chunks, microbatches=owners, run_ahead=1)
