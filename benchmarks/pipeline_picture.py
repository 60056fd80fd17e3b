"""Draws three schedules of one step below each other: python -m benchmarks.pipeline_picture FILE.

Four groups of eight rollouts on four stages, 10,240 prompt tokens and 2,048 of each response, one
rollout per wave: phases with barriers, the planner's with the prompt whole, and in chunks of a
wave.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from benchmarks.barriers import barrier_plan, simulate_with_barriers
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.lab.view.drawing import comparison_svg
from megatron_prefix.plan.planner import best_plan, loss_ready_after
from megatron_prefix.tree import Forest, Pairs, TreeOptions, build

GROUPS, ROLLOUTS, PROMPT, RESPONSE, STAGES = 4, 8, 10240, 2048, 4
WIDTH = 760  # pixels: about a page's, so that its letters are those of the text


def flat_groups(
    prompt: int = PROMPT, response: int = RESPONSE, num: int = ROLLOUTS, chunk_tokens: int = 0
) -> Forest:
    """GROUPS groups of `num` rollouts; no token comes twice, so that only prompts are shared."""
    rollouts, groups = [], []
    for group in range(GROUPS):
        shared = np.arange(prompt + 1) + group * prompt
        for number in range(num):
            own = np.arange(response) + (1 + group * num + number) * (1 << 20)
            tokens = np.concatenate([shared, own])
            trained = np.arange(len(tokens) - 1) >= prompt
            rollouts.append(Pairs(tokens[:-1], tokens[1:], trained))
            groups.append(group)
    options = TreeOptions(chunk_tokens=chunk_tokens, segment_tokens=response)
    return build(rollouts, groups, options)


def picture() -> str:
    """The SVG document."""
    whole, chunked = flat_groups(), flat_groups(chunk_tokens=RESPONSE)
    phases = barrier_plan(whole, STAGES)
    runs = [("phases A, B, C of each group with barriers", simulate_with_barriers(phases), phases)]
    for name, forest in (
        ("stage-local order, prompts whole", whole),
        ("stage-local order, prompts in chunks of a wave", chunked),
    ):
        plan = best_plan(forest, STAGES)
        runs.append((name, simulate(plan, ready_after=loss_ready_after(forest)), plan))
    title = (
        f"{GROUPS} groups of {ROLLOUTS} rollouts on {STAGES} stages, P = {PROMPT}, R = {RESPONSE}"
    )
    return comparison_svg(runs, title, WIDTH)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(), encoding="utf-8")
