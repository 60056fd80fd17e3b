"""Thousands of random plans: trees, pipelines, chunks, microbatches and bounds."""

from typing import Any, NamedTuple

import numpy as np

from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.joint_forest import joint_forest
from megatron_prefix.plan.planner import best_plan, loss_ready_after, make_plan
from megatron_prefix.tree import Forest, Pairs, TreeOptions, build
from tests.harness.trees import random_forest


class Case(NamedTuple):
    """The arguments of a random plan; `options` are `make_plan`'s."""

    forest: Forest
    num_ranks: int
    options: dict[str, Any]


def random_case(rng):
    """A random case, of rollouts built into trees or of trees made directly, or a union of some."""
    forest, microbatch_of = _step(rng)
    if rng.random() < 0.1:
        steps = [(forest, microbatch_of), *(_step(rng) for _ in range(rng.randint(1, 2)))]
        union = joint_forest(*(list(parts) for parts in zip(*steps, strict=True)))
        forest, microbatch_of = union.union, [*union.union_microbatch_of]
    num_ranks = rng.randint(1, 8)
    num_chunks = rng.randint(1, 4) if num_ranks > 1 else 1
    return Case(
        forest,
        num_ranks,
        dict(
            num_chunks=num_chunks,
            microbatches=microbatch_of,
            run_ahead=rng.choice((0, 0.5, 1, 2, 3, None)),
            group_size=rng.choice((None, num_ranks, num_ranks + 1, 2 * num_ranks, 1)),
            max_live_positions=rng.choice((0, 0, 1, 50, 200)),
        ),
    )


def run(case, best=False):
    """Plans and simulates; with `best` by `best_plan`."""
    options = case.options
    if best:
        ahead = options["run_ahead"]
        options = {**options, "run_ahead": 2 if ahead is None else ahead}
        del options["max_live_positions"]  # which it sets itself
    plan = (best_plan if best else make_plan)(case.forest, case.num_ranks, **options)
    return simulate(plan, ready_after=loss_ready_after(case.forest, options["microbatches"]))


def _step(rng):
    forest = random_forest(rng) if rng.random() < 0.5 else _built(rng)
    size = rng.randint(1, 4)  # rollouts of a microbatch
    microbatch_of = [rollout // size for rollout in range(len(forest.num_positions))]
    if rng.random() < 0.2:
        rng.shuffle(microbatch_of)
    return forest, microbatch_of


def _built(rng):
    """Groups of rollouts that branch off one text; some are equal."""
    draw = np.random.default_rng(rng.randrange(2**32))
    rollouts, groups = [], []
    for group in range(rng.choice((1, 2, 3, 4, 16))):
        text = draw.integers(0, 5, rng.randint(5, 80))
        for _ in range(rng.randint(1, 6)):
            kept, more = rng.randint(1, len(text)), draw.integers(0, 3, rng.randint(2, 40))
            tokens = np.concatenate([text[:kept], more])
            trained = draw.random(len(tokens) - 1) < rng.choice((0.05, 0.3))
            rollouts.append(Pairs(tokens[:-1], tokens[1:], trained))
            groups.append(group)
    align = rng.choice((1, 1, 2, 4))
    options = TreeOptions(
        multiple=align, chunk_tokens=rng.choice((0, 8, 16, 32)),
        segment_tokens=rng.choice((0, 4, 16, 64, 300)), min_gain=rng.choice((0, 20)),
        loss_in_leaves=rng.random() < 0.2, share=rng.choice(("group", "batch")),
    )  # fmt: skip
    return build(rollouts, groups, options)
