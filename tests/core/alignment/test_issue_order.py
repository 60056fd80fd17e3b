"""Ranks issue all their collectives in orders that can be merged into one, whatever they run.

Reductions of gradients that start during backwards, experts' exchanges of tokens, sums of counts,
and what ranks tell one another: where two ranks have two orders of two of these, each may wait for
the other on a GPU.
"""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest

from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.runtime import Layout
from tests.core.alignment.test_overlap import NO_AUX, SHARDED, VOCAB, Job, alone, trees
from tests.harness.issue_order import Issued, recorded, why_not_ending
from tests.harness.ranks import run_ranks


def unlike(number, rank, spec, layout):
    """Trees of other depths and sizes on every rank and in every step; some share nothing."""
    shape = (number + rank) % 3
    seed = 10 * number + rank
    if shape == 0:
        return [*generate(1, 8, 16, 1 + number % 2, vocab_size=VOCAB, seed=seed)]
    tree = {"tree": "branch", "depth": 2} if shape == 2 else {}
    return [*generate(shape, 32, 16, 2, vocab_size=VOCAB, seed=seed, **tree)]


GATHERS = {**SHARDED, "overlap_param_gather": True}
GLOBAL_AUX = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0}
JOBS: dict[str, tuple[Job, Callable[..., Any], str]] = {
    "EP2, weights gathered during forwards": (
        Job("tiny-moe", Layout(dp=2, ep=2), NO_AUX, GATHERS), unlike, "PPPP",
    ),
    "EP2 of DP4": (Job("tiny-moe", Layout(dp=4, ep=2), NO_AUX), unlike, "PPPP"),
    "DP2, global_aux_loss": (Job("tiny-moe", model=GLOBAL_AUX), trees, "PPP"),
    "CP2 DP2": (Job(layout=Layout(cp=2, dp=2)), alone, "PPP"),
}  # fmt: skip


def issued(job, data, turns):
    """Per rank what it issues in each step."""

    def on_rank():
        steps: list[list[Issued]] = []

        @contextmanager
        def around(*_):
            steps.append([])
            with recorded(steps[-1]):
                yield

        job._replace(around=around).runs_here([(turns, True)], data)
        return steps

    return run_ranks(job.layout.world_size, on_rank)


@pytest.mark.parametrize("name", JOBS)
def test_ranks_have_one_order(name):
    ranks = issued(*JOBS[name])
    for number, step in enumerate(zip(*ranks, strict=True)):
        assert why_not_ending(step) == "", f"step {number}"
    kinds = [one.kind for one in ranks[0][-1]]
    assert "all_reduce" in kinds and len(kinds) > 20


def test_two_orders_are_noticed():
    reduced, exchanged = Issued("all_reduce", "1", (0, 1)), Issued("all_to_all", "2", (0, 1))
    assert why_not_ending([[reduced, exchanged], [reduced, exchanged]]) == ""
    assert "deadlock: rank 0 at 0: all_reduce" in why_not_ending(
        [[reduced, exchanged], [exchanged, reduced]]
    )
    assert why_not_ending([[reduced], []])
