"""Rollouts -> segment tree -> plan -> simulated timeline. Needs neither torch nor Megatron.

Run it with the package installed: python examples/plan_a_step.py [PICTURE.svg]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.lab.view.drawing import timeline_svg
from megatron_prefix.plan.error import marked_grid
from megatron_prefix.plan.planner import loss_ready_after, make_plan
from megatron_prefix.tree import Forest, Pairs, TreeOptions, build

PROMPT, TURN, ANSWER = 512, 256, 128  # tokens
NUM_STAGES = 2


def rollouts(seed: int) -> list[Pairs]:
    """One group: four answers to a prompt, two of which share a first turn as well."""
    random = np.random.default_rng(seed)
    prompt, turn = random.integers(1000, size=PROMPT), random.integers(1000, size=TURN)
    group = []
    for start in ([], [], turn, turn):
        tokens = np.concatenate([prompt, start, random.integers(1000, size=ANSWER)]).astype(int)
        trained = np.arange(len(tokens)) >= PROMPT
        # A position is an (input, label) pair: a rollout of n tokens has n-1 of them.
        group.append(Pairs(tokens[:-1], tokens[1:], trained[1:]))
    return group


def show_tree(forest: Forest) -> None:
    """One line per segment, indented by the number of spans above its deepest span."""
    above = {place: number for path in forest.paths for number, place in enumerate(path)}
    for index, segment in enumerate(forest.segments):
        kind = "inner segment" if segment.inner else f"wave of {len(segment.spans)}"
        first = segment.spans[0]
        members = sorted({rollout for span in segment.spans for rollout in span.rollouts})
        indent = "  " * max(above[index, number] for number in range(len(segment.spans)))
        extent = f"positions {first.start} to {max(span.end for span in segment.spans) - 1}"
        print(f"{indent}{index}: {kind}, {extent}, rollouts {members}")


def main() -> None:
    """Plans two groups for a pipeline of two stages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("picture", nargs="?", type=Path, help="SVG file to write")
    picture: Path | None = parser.parse_args().picture
    groups = [rollouts(seed=1), rollouts(seed=2)]
    numbers = [number for number, group in enumerate(groups) for _ in group]
    # Chunks about as long as a wave keep every stage of a pipeline busy.
    options = TreeOptions(chunk_tokens=256, segment_tokens=256)
    forest = build([rollout for group in groups for rollout in group], numbers, options)
    print(f"{forest.raw_tokens} tokens, {forest.executed_tokens} of them executed\n")
    show_tree(forest)

    plan = make_plan(forest, NUM_STAGES)
    print(f"\n{marked_grid(plan.programs)}")
    timeline = simulate(
        plan, ready_after=loss_ready_after(forest)
    )  # raises if the plan could not run
    print(
        f"\nbubble {timeline.bubble_fraction:.0%}, at most {timeline.peak_live_positions} live rows"
    )
    if picture is not None:
        picture.write_text(
            timeline_svg(timeline, plan, "two groups on two stages", width=760), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
