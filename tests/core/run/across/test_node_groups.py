"""Prompts cross the data-parallel ranks of one host alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.run.across import hosts
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.schedule import PrefixSchedule
from tests.core.alignment.test_across_ranks_steps import evenly
from tests.harness import steps
from tests.harness.one_rank import small_model
from tests.harness.ranks import run_ranks
from tests.harness.steps import Contract

pytestmark = pytest.mark.turns

NODE = PrefixConfig(min_gain=0, kernel="math", across_ranks="node")


def crossed(layout: Layout, names: list[str]) -> int:
    """A rank's part of a pass and an update with ranks on these hosts: positions that it received
    and sent."""
    runtime.initialize(layout)
    hosts.here = lambda: names[dist.get_rank()]  # type: ignore[assignment]  # the rank's process
    model = small_model(dtype=torch.float64, layout=layout)
    items = evenly(0, dist.get_rank() // layout.tp % layout.dp)
    schedule = PrefixSchedule(NODE, Callbacks(passes_together=True))
    found: list[Any] = []
    for run in (stock_schedule(), schedule):
        steps.call(run, Contract().step, model, items, forward_only=True)
        steps.zero_gradients(model)
        steps.call(run, Contract().step, model, items)
        found.append(steps.gradients(model))
    stock, ours = found
    terms = {name: float(one.abs().max()) for name, one in stock.items()}
    steps.assert_gradients(ours, steps.Reference(stock, terms), 1000)
    done = schedule.report.crossed if schedule.report else None
    return done.received_tokens + done.sent_tokens if done else 0


CASES = {
    "one host": (Layout(dp=3), "aaa", [True] * 3),
    "two hosts": (Layout(dp=4), "aabb", [True] * 4),
    "one of them has one rank": (Layout(dp=3), "aab", [True, True, False]),
    "one rank each": (Layout(dp=3), "abc", [False] * 3),
    "two hosts by turns": (Layout(dp=4), "abab", [True] * 4),
    "stages of one pipeline": (Layout(dp=2, pp=2), "aabb", [True] * 4),
    "a stage's ranks are apart": (Layout(dp=2, pp=2), "aabc", [False] * 4),
}


@pytest.mark.parametrize("name", CASES)
def test_prompts_cross_ranks_of_one_host_alone(name: str) -> None:
    layout, names, wanted = CASES[name]
    found = run_ranks(layout.world_size, crossed, layout, [*names])
    assert [num > 0 for num in found] == wanted


def test_two_hosts_share_less_than_one() -> None:
    totals = [sum(run_ranks(4, crossed, Layout(dp=4), [*names])) for names in ("aaaa", "aabb")]
    # Of three prompts of four to five blocks, counted at both ends.
    assert 32 <= totals[0] / (2 * 3 * 3) < 40, "to three ranks"
    assert 32 <= totals[1] / (2 * 3 * 2) < 40, "to one rank on either host"
