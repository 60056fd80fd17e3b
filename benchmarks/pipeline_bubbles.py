"""Bubble fractions of docs/results.md: simulated, 4 flat groups, a backward counts as two forwards.

    python -m benchmarks.pipeline_bubbles

Prints a Markdown table. "Barriers" runs each group's prefix, waves and prefix again one after the
other on all stages; the others are the planner's, with the prefix whole or in chunks of a wave's
length. In brackets the most rows a stage holds for backward.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.barriers import barrier_plan, simulate_with_barriers
from benchmarks.pipeline_picture import flat_groups
from megatron_prefix.lab.plans.timeline import Timeline, simulate
from megatron_prefix.plan.planner import best_plan, loss_ready_after, make_plan

CASES = ((10240, 2048, 16, 4), (10240, 2048, 8, 4), (8192, 1024, 16, 4), (10240, 2048, 8, 8))
COLUMNS = ("barriers", "prefix whole", "in chunks", "in chunks, running ahead (default)")


def timelines(prompt: int, response: int, rollouts: int, num_ranks: int) -> Iterator[Timeline]:
    """One per column."""
    whole = flat_groups(prompt, response, rollouts)
    chunked = flat_groups(prompt, response, rollouts, chunk_tokens=response)
    yield simulate_with_barriers(barrier_plan(whole, num_ranks))
    for forest, plan_of in ((whole, make_plan), (chunked, make_plan), (chunked, best_plan)):
        yield simulate(plan_of(forest, num_ranks), ready_after=loss_ready_after(forest))


def main() -> None:
    """Prints the table."""
    print(f"| P, R, n, stages | {' | '.join(COLUMNS)} |")
    print("|---|---|---|---|---|")
    for case in CASES:
        cells = [f"{t.bubble_fraction:.3f} ({t.peak_live_positions:,})" for t in timelines(*case)]
        print(f"| {', '.join(map(str, case))} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
