"""Prompts cross data-parallel ranks in step after step, also where a rank has nothing to train."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import numerics, runtime
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.refusals.table import ACROSS_UNREDUCED
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.tree import Pairs
from tests.harness import steps
from tests.harness.one_rank import small_model
from tests.harness.ranks import run_ranks
from tests.harness.steps import Contract, Microbatch, microbatch

pytestmark = pytest.mark.turns

PROMPT, ANSWER, PROMPTS = 40, 8, 3
CONFIG = PrefixConfig(min_gain=0, kernel="math", across_ranks="on")


def rollout(step: int, prompt: int, number: int, trained: int = PROMPT) -> Pairs:
    """Of a prompt that each step has for itself."""
    first = np.random.default_rng([step, prompt]).integers(0, 60, PROMPT)
    last = np.random.default_rng([step, prompt, number]).integers(0, 60, ANSWER)
    tokens = np.r_[first, last]
    return Pairs(tokens[:-1], tokens[1:], np.arange(len(tokens) - 1) >= trained - 1)


Deal = Callable[[int, int], list[Microbatch]]
"""(step, data-parallel rank) -> its microbatches."""


def evenly(step: int, number: int) -> list[Microbatch]:
    """Each rank has a rollout of every prompt; from the second step on loss in prompts, too."""
    trained = PROMPT if not step else PROMPT // 2
    return [
        microbatch([rollout(step, prompt, number, trained)], prompt, place)
        for place, prompt in enumerate(range(PROMPTS))
    ]


def idle(samples: Callable[[int], list[Pairs]], num: int) -> Deal:
    """The last rank trains on nothing: it has `num` microbatches of these samples."""

    def deal(step: int, number: int) -> list[Microbatch]:
        if number < dist.get_world_size() - 1:
            return evenly(step, number)
        return [microbatch(samples(step), 0, place) for place in range(num)]

    return deal


def of_other_tokens(length: int) -> Callable[[int], list[Pairs]]:
    def samples(_: int) -> list[Pairs]:
        tokens = np.full(length + 1, 61)
        return [Pairs(tokens[:-1], tokens[1:], np.zeros(length, bool))]

    return samples


def of_a_prompt(step: int) -> list[Pairs]:
    return [rollout(step, 0, 9, trained=10**6)]


def update(model: Any) -> None:
    """Plain descent: AdamW would make much of rounding where gradients are next to nothing."""
    with torch.no_grad():
        for weight in unwrap(model).parameters():
            weight -= weight.main_grad


def sequence(
    config: PrefixConfig, layout: Layout, deal: Deal, options: dict[str, Any]
) -> list[int]:
    """A rank's part of three updates with a pass without gradients before each: the positions that
    it received or sent in every call. Losses, gradients and weights are the stock schedule's."""
    runtime.initialize(layout)
    number = dist.get_rank() // layout.tp % layout.dp
    ours = PrefixSchedule(config, Callbacks(passes_together=True))
    schedules, crossed = (stock_schedule(), ours), []
    models = [small_model(dtype=torch.float64, layout=layout, **options) for _ in schedules]
    contract = Contract(per_token=True)
    for model in models:
        contract.configure(model)
    for step, forward_only in itertools.product(range(3), (True, False)):
        items, found = deal(step, number), []
        for schedule, model in zip(schedules, models, strict=True):
            steps.zero_gradients(model)
            logs = steps.call(schedule, contract.step, model, items, forward_only=forward_only)
            found.append((logs, steps.gradients(model)))
        (stock_logs, stock), (logs, gradients) = found
        assert [float(one["loss"]) for one in logs] == pytest.approx(
            [float(one["loss"]) for one in stock_logs], rel=1e-9, abs=1e-12
        )
        report = ours.report
        done = report.crossed if report else None
        crossed.append(done.received_tokens + done.sent_tokens if done else 0)
        if forward_only:
            continue
        terms = {name: float(one.abs().max()) for name, one in stock.items()}
        num = PROMPTS * layout.dp * (PROMPT + ANSWER)
        steps.assert_gradients(gradients, steps.Reference(stock, terms), num)
        for model in models:
            update(model)
    theirs = dict(unwrap(models[0]).named_parameters())
    for name, weight in unwrap(models[1]).named_parameters():
        limit = numerics.tolerance(torch.float64, 1000, 64, 8)
        error = float((weight - theirs[name]).abs().max() / theirs[name].abs().max())
        assert error <= limit, f"{name}: {error}"
    return crossed


def test_several_updates_and_passes_without_gradients() -> None:
    for one in run_ranks(3, sequence, CONFIG, Layout(dp=3), evenly, {}):
        assert all(one), "in every call"


def test_several_updates_in_mode_auto() -> None:
    config = PrefixConfig(mode="auto", min_gain=0, kernel="math", min_speedup=0.01)
    run_ranks(2, sequence, config, Layout(dp=2), evenly, {})


def unwrapped(config: PrefixConfig, says: Callbacks) -> tuple[int, bool, str]:
    """A rank's step with a model in no wrapper: positions that crossed, whether its
    own gradients are the stock schedule's, and why nothing crossed. Their sums always are."""
    runtime.initialize(Layout(dp=2))
    items, contract, found = evenly(0, dist.get_rank()), Contract(per_token=True), []
    ours = PrefixSchedule(config, says)
    for schedule in (stock_schedule(), ours):
        model = small_model(dtype=torch.float64, wrap_ddp=False)
        contract.configure(model)
        steps.call(schedule, contract.step, model, items)
        found.append(steps.gradients(model))
    stock, gradients = found
    terms = {name: float(one.abs().max()) for name, one in stock.items()}
    largest = {name: float((gradients[name] - one).abs().max()) for name, one in stock.items()}
    limit = numerics.tolerance(torch.float64, 1000, 64, 8) * max(terms.values())
    for gradient in itertools.chain(stock.values(), gradients.values()):
        dist.all_reduce(gradient)
    num = PROMPTS * 2 * (PROMPT + ANSWER)
    steps.assert_gradients(gradients, steps.Reference(stock, terms), num)
    report: Any = ours.report
    crossed = report.crossed.received_tokens if report.crossed else 0
    return crossed, max(largest.values()) <= limit, report.why_alone


def test_without_a_wrapper_prompts_cross_only_if_told() -> None:
    auto = replace(CONFIG, mode="on", across_ranks="auto")
    for crossed, is_stocks, why in run_ranks(2, unwrapped, auto, Callbacks()):
        assert (crossed, is_stocks) == (0, True)
        assert why == f"{ACROSS_UNREDUCED.name} is not supported yet"
    ranks = run_ranks(2, unwrapped, CONFIG, Callbacks(sums_gradients=True))
    assert sum(crossed for crossed, *_ in ranks) > 0
    assert not any(is_stocks for _, is_stocks, _ in ranks)


IDLE = {
    "one token": idle(of_other_tokens(1), 1),
    "other tokens": idle(of_other_tokens(30), 2),
    "a prompt of others": idle(of_a_prompt, 1),
    "equally many microbatches": idle(of_other_tokens(1), PROMPTS),
}


@pytest.mark.parametrize("name", IDLE)
def test_a_rank_that_trains_on_nothing(name: str) -> None:
    found = run_ranks(3, sequence, CONFIG, Layout(dp=3), IDLE[name], {})
    assert all(map(any, found[:2]))
    assert any(found[2]) == (name == "a prompt of others")
