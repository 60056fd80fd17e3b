"""`--chunk-tokens auto`: the chunk length whose simulated step is shortest.  Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_prefix.pipeline.cost import CostModel
from megatron_prefix.pipeline.planner import best_plan, closings
from megatron_prefix.pipeline.simulator import Cost, simulate, token_cost
from megatron_prefix.tree import Pairs, Segment, TreeOptions, build

_SHARES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
_LEAST = 128  # shorter chunks are all overhead


def action_cost(segment: Segment, kind: str) -> float:
    """Tokens, and an action's overhead: without it the shortest chunks always look best."""
    return token_cost(segment, kind) + CostModel.action_tokens * (1 if kind == "F" else 2)


def best_chunk_tokens(
    rollouts: Sequence[Pairs],
    groups: Sequence[int] | None,
    options: TreeOptions,
    num_ranks: int,
    *,
    num_chunks: int = 1,
    microbatches: Sequence[int] | None = None,
    extra: int = 2,
    cost: Cost = action_cost,
) -> int:
    """The best of some chunk lengths for a step, 0 where cutting does not pay.

    Tried are 0, simple multiples and shares of a wave, and shares of the longest segment, each by
    planning and simulating the whole step.  One rank never waits, so chunks would only cost it.

    Args:
        rollouts: see `tree.build`.
        groups: see `tree.build`.
        options: all but `chunk_tokens` counts.
        num_ranks: pipeline size.
        num_chunks: model chunks a rank.
        microbatches: see `planner.closings`.
        extra: see `planner.best_plan`.
        cost: time of a segment's F or B on one rank.
    """
    if num_ranks == 1:
        return 0

    def tried(chunk_tokens: int) -> tuple[float, int, int]:
        forest = build(rollouts, groups, dataclasses.replace(options, chunk_tokens=chunk_tokens))
        plan = best_plan(
            forest, num_ranks, num_chunks=num_chunks, microbatches=microbatches, extra=extra
        )
        timeline = simulate(plan, cost=cost, needed=closings(forest, microbatches))
        return timeline.makespan, len(forest.segments), chunk_tokens

    whole = build(rollouts, groups, dataclasses.replace(options, chunk_tokens=0))
    longest = max((row.length for segment in whole.segments for row in segment.rows), default=0)
    wave = min(options.wave_tokens or longest, longest)
    lengths = {longest // share for share in _SHARES} | {2 * wave, wave, wave // 2, wave // 4}
    least = max(_LEAST, options.align)
    return min(tried(n) for n in {0} | {n for n in lengths if least <= n < longest})[2]
