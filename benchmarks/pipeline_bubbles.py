"""Bubble fractions of the README: simulated, 4 flat groups, a backward counted as two forwards.

    python benchmarks/pipeline_bubbles.py

Prints a Markdown table. "Barriers" runs each group's prefix, waves and prefix again one after the
other on all stages; the others are the planner's, with the prefix whole or in chunks of a wave's
length. In brackets the most rows a stage holds for backward.
"""

from __future__ import annotations

import numpy as np

from megatron_prefix.pipeline.planner import best_plan, closings, make_plan
from megatron_prefix.pipeline.simulator import simulate
from megatron_prefix.tree import Forest, Pairs, TreeOptions, build

GROUPS = 4
CASES = ((10240, 2048, 16, 4), (10240, 2048, 8, 4), (8192, 1024, 16, 4), (10240, 2048, 8, 8))


def forest(prompt: int, response: int, rollouts: int, chunk_tokens: int) -> Forest:
    """Flat groups: the prompt shared but for its last pair, one rollout a wave."""
    draw = np.random.default_rng(0)
    pairs, groups = [], []
    for group in range(GROUPS):
        shared = draw.integers(0, 1 << 20, prompt)
        for rollout in range(rollouts):
            tail = draw.integers(0, 1 << 20, response) + (rollout + 1 << 21)
            tokens = np.concatenate([shared, tail])
            trained = np.arange(1, prompt + response) >= prompt
            pairs.append(Pairs(tokens[:-1], tokens[1:], trained))
            groups.append(group)
    options = TreeOptions(chunk_tokens=chunk_tokens, wave_tokens=response, min_gain=0)
    return build(pairs, groups, options)


def barrier_makespan(made: Forest, num_ranks: int) -> float:
    """Makespan with barriers: phases A, B and C of every group simulated one after the other."""
    total = 0.0
    for tree in range(GROUPS):
        members = [i for i, s in enumerate(made.segments) if s.tree == tree]
        prefix = sum(made.segments[i].num_rows for i in members if made.segments[i].inner)
        waves = [made.segments[i].num_rows for i in members if not made.segments[i].inner]
        total += 3 * prefix * num_ranks  # forward through all stages, then backward
        total += 3 * (sum(waves) + (num_ranks - 1) * waves[0])  # one forward one backward
    return total


def main() -> None:
    """Prints the table."""
    print("| P, R, n, stages | barriers | prefix whole | in chunks | in chunks, running ahead |")
    print("|---|---|---|---|---|")
    for prompt, response, rollouts, num_ranks in CASES:
        whole = forest(prompt, response, rollouts, 0)
        chunked = forest(prompt, response, rollouts, response)
        busy = 3 * sum(segment.num_rows for segment in whole.segments)
        cells = [f"{1 - busy / barrier_makespan(whole, num_ranks):.3f}"]
        for made, plan_of in ((whole, make_plan), (chunked, make_plan), (chunked, best_plan)):
            timeline = simulate(plan_of(made, num_ranks), needed=closings(made))
            cells.append(f"{timeline.bubble_fraction:.3f} ({timeline.peak_live_rows:,})")
        print(f"| {prompt}, {response}, {rollouts}, {num_ranks} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
