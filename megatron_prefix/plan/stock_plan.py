"""What Megatron's own schedule runs on the trainer's microbatches, as a plan.  Pure."""

from __future__ import annotations

import collections
import itertools
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
    forest: Forest,
    microbatches_of: Sequence[Sequence[int]],
    num_ranks: int = 1,
    num_chunks: int = 1,
) -> Plan:
    """One forward one backward over the neighbouring microbatches with the most positions, of the
    pipeline that has them.

    As many as a pipeline holds at once, and as many again (with virtual stages all of them), so its
    peak of memory is that of the whole step. Padding is of the rollouts as they were read, and
    counts.

    Args:
        forest: of the step; its segments are not looked at.
        microbatches_of: of every pipeline that runs side by side the trainer's microbatch of each
            of its rollouts, which the forest has one pipeline behind the other.
        num_ranks: pipeline size.
        num_chunks: model chunks a rank.
    """
    held = 2 * num_ranks if num_ranks > 1 else 1
    multiple, first = forest.multiple, 0
    heaviest: list[list[int]] = []
    for microbatch_of in microbatches_of:
        lengths = collections.defaultdict(list)
        for rollout, microbatch in enumerate(microbatch_of, first):
            lengths[microbatch].append(-(-forest.num_positions[rollout] // multiple) * multiple)
        first += len(microbatch_of)
        mine = [lengths[one] for one in sorted(lengths)]
        num = len(mine) if num_chunks > 1 else min(len(mine), held)
        windows = (mine[begin : begin + num] for begin in range(len(mine) - num + 1))
        heaviest = max(heaviest, *windows, key=_positions)
    owners = [number for number, one in enumerate(heaviest) for _ in one]
    rollouts = itertools.count()
    segments = [
        Segment(tuple(Span(0, n, n, (next(rollouts),)) for n in one), inner=False, scored=True)
        for one in heaviest
    ]
    padded = tuple(itertools.chain(*heaviest))
    part = Forest(tuple(segments), padded, tuple(n - 1 for n in padded), multiple)
    return make_plan(part, num_ranks, num_chunks=num_chunks, microbatches=owners, run_ahead=1)


def _positions(microbatches: Sequence[Sequence[int]]) -> int:
    return sum(map(sum, microbatches))
