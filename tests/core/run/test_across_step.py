"""Whether prompts cross data-parallel ranks: all ranks decide alike, and one that fails says so."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare, StepFailed
from megatron_prefix.features.across import step as across_step
from megatron_prefix.features.across.communicator import Communicator
from megatron_prefix.features.across.step import (
    APART,
    NOTHING,
    RESTS,
    SLOWER,
    tell_alone,
    why_alone,
)
from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.plan import cost
from megatron_prefix.refusals.table import ACROSS_EXPERTS, ACROSS_GATHERS, ACROSS_UNREDUCED
from megatron_prefix.run import planning
from megatron_prefix.run.request import Backoff
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.tree import Pairs
from tests.harness import steps
from tests.harness.one_rank import small_model
from tests.harness.predicted import predicted_bytes
from tests.harness.ranks import run_ranks
from tests.harness.steps import Contract, microbatch

AUTO = PrefixConfig(mode="auto", min_gain=0, min_speedup=0.01, kernel="math")
TOLD = replace(AUTO, mode="on", across_ranks="auto")
"""In mode "on" it is asked for."""
SOON_S = 60.0
FAILS = 1
"""The rank that fails."""


def sharing_experts(mine: list[Any]) -> list[str]:
    """A rank's part of two steps of ranks that share experts: why nothing crossed in each."""
    layout = Layout(dp=2, ep=2)
    runtime.initialize(layout)
    Communicator.measured = lambda _: 1e15  # type: ignore[method-assign]
    cost.ACTION_SECONDS = 0.0  # beside it small layers cost nothing
    model = small_model("tiny-moe", dtype=torch.float64, layout=layout)
    items, said = step_of(dist.get_rank(), prompts=2), []
    stock = gradients(stock_schedule(), model, items)
    for config in mine:
        schedule = PrefixSchedule(config)
        with predicted_bytes():
            ours = gradients(schedule, model, items)
        expected = steps.Reference(stock, {n: float(g.abs().max()) for n, g in stock.items()})
        steps.assert_gradients(ours, expected, sum(i["tokens"].numel() for i in items))
        said.append(schedule.report.why_alone)  # type: ignore[union-attr]
    return said


def test_ranks_that_share_experts_decide_by_what_runs_beside() -> None:
    small = replace(AUTO, memory="retain", memory_budget_gb=1e-6)
    for crosses, too_much in run_ranks(2, sharing_experts, [AUTO, small]):
        assert crosses == "" and "more memory than it may" in too_much


def step_of(number: int, prompts: int) -> list[Any]:
    """A rank's microbatches, one a prompt: each rank has a rollout of all of them."""
    items = []
    for prompt in range(prompts):
        first = np.random.default_rng(prompt).integers(0, 60, 400)
        last = np.random.default_rng([prompt, number]).integers(0, 60, 12)
        tokens = np.r_[first, last]
        pairs = Pairs(tokens[:-1], tokens[1:], np.arange(len(tokens) - 1) >= 399)
        items.append(microbatch([pairs], prompt, prompt))
    return items


def gradients(schedule: Any, model: Any, items: list[Any]) -> dict[str, torch.Tensor]:
    steps.zero_gradients(model)
    steps.call(schedule, Contract().step, model, items)
    found = steps.gradients(model)
    steps.zero_gradients(model)
    return found


Found = tuple[list[str], float, int]
Spoil = Callable[[], contextlib.AbstractContextManager[Any]]


def run(config: PrefixConfig, layout: Layout, spoil: Spoil, num_steps: int = 2) -> Found:
    """A rank's part of some steps; see `steps_of`."""
    return run_each(layout, [(config, spoil)], num_steps)[0]


def run_each(
    layout: Layout, ways: Sequence[tuple[PrefixConfig, Spoil]], num_steps: int = 2
) -> list[Found]:
    """A rank's part of some steps, by one configuration and spoilt in one way after the other."""
    runtime.initialize(layout)
    Communicator.measured = lambda _: 1e15  # type: ignore[method-assign]  # the rank's own process
    model = small_model(dtype=torch.float64, layout=layout)
    number = dist.get_rank() % layout.dp
    items = step_of(number, prompts=2)
    stock = gradients(stock_schedule(), model, items)
    found = []
    for config, spoil in ways:
        with spoil():
            found.append(steps_of(config, model, items, stock, num_steps))
    return found


def steps_of(
    config: PrefixConfig, model: Any, items: list[Any], stock: dict[str, torch.Tensor], num: int
) -> Found:
    """Why nothing crossed in each step, or what it raised; how long that took; and the positions
    received in the last one. Gradients are stock's."""
    schedule = PrefixSchedule(config)
    begin, said = time.monotonic(), []
    for _ in range(num):
        try:
            ours = gradients(schedule, model, items)
        except (StepFailed, KeyError) as error:
            said.append(f"{type(error).__name__}: {error}")
            continue
        expected = steps.Reference(stock, {n: float(g.abs().max()) for n, g in stock.items()})
        steps.assert_gradients(ours, expected, sum(i["tokens"].numel() for i in items))
        said.append(schedule.report.why_alone)  # type: ignore[union-attr]
    crossed = schedule.report.crossed if schedule.report else None
    return said, time.monotonic() - begin, crossed.received_tokens if crossed else 0


nothing = contextlib.nullcontext
"""Spoils nothing."""


def test_prompts_cross_by_default_in_mode_auto() -> None:
    configs = AUTO, TOLD, replace(AUTO, across_ranks="off"), replace(AUTO, mode="on")
    found = run_ranks(2, run_each, Layout(dp=2), [(config, nothing) for config in configs])
    auto, told, *others = zip(*found, strict=True)
    for ranks in (auto, told):
        assert [said for said, *_ in ranks] == [["", ""]] * 2
        assert sum(received for *_, received in ranks) >= 2 * 390
    assert [[one[2] for one in other] for other in others] == [[0, 0]] * 2


def test_each_rank_is_alone_where_nothing_is_in_common() -> None:
    ranks = run_ranks(2, run, replace(AUTO, min_gain=1000), Layout(dp=2), nothing)
    assert [said for said, *_ in ranks] == [[NOTHING] * 2] * 2


def slow_messages() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(Communicator, "measured", return_value=1.0)


def test_each_rank_is_alone_where_the_slowest_gains_nothing() -> None:
    ways = [(config, slow_messages) for config in (AUTO, TOLD)]
    for said, _, received in itertools.chain(*run_ranks(2, run_each, Layout(dp=2), ways)):
        assert all(one.startswith(SLOWER) for one in said) and not received


def test_each_rank_is_alone_where_one_would_take_too_much_memory() -> None:
    """A limit that no plan keeps."""
    config = replace(AUTO, memory="retain", memory_budget_gb=1e-6)
    for said, *_ in run_ranks(2, run, config, Layout(dp=2), predicted_bytes):
        assert all("more memory than it may" in one for one in said)


def test_ranks_ask_again_after_a_while() -> None:
    backoff, asked = Backoff(), []
    for step in range(60):
        if not backoff.skips():
            asked.append(step)
            backoff.note(useful=step == 26)
            if backoff.is_due:
                backoff.begin()
    assert asked == [0, 1, 26, 27, 28, 53], "what crossed once begins anew"
    for said, *_ in run_ranks(2, run, AUTO, Layout(dp=2), slow_messages, 4):
        assert [why.startswith(SLOWER) for why in said] == [True, True, False, False]
        assert said[2:] == [RESTS] * 2


def failing(module: Any, name: str) -> Spoil:
    """Spoils one rank: a function raises there."""
    return lambda: (
        mock.patch.object(module, name, _raise) if dist.get_rank() == FAILS else nothing()
    )


def _raise(*_: Any, **__: Any) -> None:
    raise KeyError("spoiled")


PLACES = {
    "before ranks tell": (across_step, "beginnings_of"),
    "what is in common": (across_step, "common_spans"),
    "whether it pays": (across_step.Across, "pays"),
    "the forecast": (planning.Planning, "forecast"),
}


@functools.cache
def spoilt(layout: Layout) -> list[list[Found]]:
    """Of every rank what it found with each of the places spoilt."""
    ways = [(AUTO, failing(*place)) for place in PLACES.values()]
    # Whether a second step is like the first asks for no other parallelism.
    return run_ranks(layout.world_size, run_each, layout, ways, 2 if layout.world_size == 2 else 1)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, pp=2)], ids=str)
def test_one_rank_that_fails_to_decide_leaves_each_alone(place: str, layout: Layout) -> None:
    ranks = [found[[*PLACES].index(place)] for found in spoilt(layout)]
    first = [said for said, *_ in ranks if said[0]]
    assert len(first) == layout.dp, "first stages know"
    assert all("rank 1: KeyError: 'spoiled'" in one for said in first for one in said)
    assert max(seconds for _, seconds, _ in ranks) < SOON_S
    assert sum(received for *_, received in ranks) == 0


@pytest.mark.parametrize("place", ["before ranks tell", "what is in common"])
def test_with_on_all_ranks_end_with_its_reason(place: str) -> None:
    config = replace(AUTO, mode="on", across_ranks="on")
    other, failed = run_ranks(2, run, config, Layout(dp=2), failing(*PLACES[place]))
    assert failed[0] == ["KeyError: 'spoiled'"] * 2
    assert other[0] == ["StepFailed: the step ends on all ranks: rank 1: KeyError: 'spoiled'"] * 2
    assert max(other[1], failed[1]) < SOON_S


def failing_behind_the_forecast() -> contextlib.AbstractContextManager[Any]:
    """Spoils one rank: its proposal raises when ranks have agreed that payloads cross."""
    stock, calls = planning.Planning.proposed, []

    def proposed(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return stock(*args, **options) if len(calls) % 2 else _raise()

    fails = dist.get_rank() == FAILS
    return mock.patch.object(planning.Planning, "proposed", proposed) if fails else nothing()


def test_failing_to_plan_what_crosses_ends_the_step_of_all() -> None:
    config = replace(AUTO, mode="on", across_ranks="auto")
    other, failed = run_ranks(2, run, config, Layout(dp=2), failing_behind_the_forecast)
    assert failed[0] == ["KeyError: 'spoiled'"] * 2
    assert other[0] == ["StepFailed: the step ends on all ranks: rank 1: KeyError: 'spoiled'"] * 2
    assert max(other[1], failed[1]) < SOON_S


# Who asks -----------------------------------------------------------------------------------------

GROUP = SimpleNamespace(size=lambda: 2)
GATHERING = [SimpleNamespace(ddp_config=SimpleNamespace(overlap_param_gather=True))]
FREE = {"experts": None, "models": (), "forward_only": False, "reduces": True}


def asked(
    mode: str, across: str | None, together: bool = True, gathers_tokens: bool = False, **has: Any
) -> str | None:
    model = SimpleNamespace(looks_ahead=False, gathers_tokens=gathers_tokens)
    rank: Any = SimpleNamespace(
        **{"model": model, "data_ranks": GROUP, "siblings": GROUP, **FREE, **has}
    )
    return why_alone(PrefixConfig(mode=mode, across_ranks=across), rank, together=together)


def test_ranks_decide_together_in_mode_auto_unless_told() -> None:
    wanted = {
        ("auto", None): None, ("auto", "on"): None, ("auto", "off"): "", ("on", None): "",
        ("on", "auto"): None, ("on", "on"): None, ("observe", None): "", ("observe", "on"): "",
    }  # fmt: skip
    assert {both: asked(*both) for both in wanted} == wanted
    assert asked("auto", None, siblings=SimpleNamespace(size=lambda: 1)) == ""


def test_what_is_in_the_way_is_said() -> None:
    assert asked("auto", None, together=False) == APART
    assert asked("auto", None, models=GATHERING) == f"{ACROSS_GATHERS.name} is not supported yet"
    with pytest.raises(CannotShare, match=ACROSS_GATHERS.name):
        asked("auto", "on", models=GATHERING)
    with pytest.raises(CannotShare, match=ACROSS_EXPERTS.name):
        asked("on", "on", experts=GROUP, gathers_tokens=True)
    with pytest.raises(CannotShare, match=ACROSS_UNREDUCED.name):
        asked("on", "on", reduces=False)
    assert asked("on", "on", reduces=False, forward_only=True) is None


def test_why_ranks_are_alone_is_logged_once_for_every_reason(caplog: Any) -> None:
    rank: Any = SimpleNamespace(data_ranks=None)
    rank.groups = SimpleNamespace(tp=SimpleNamespace(rank=lambda: 0))
    told: set[str] = set()
    with caplog.at_level(logging.INFO):
        for why in ("", f"{SLOWER} (1 s)", f"{SLOWER} (2 s)", "it could not be planned (x)"):
            tell_alone(why, rank, told)
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("INFO", f"not sharing across data-parallel ranks: {SLOWER} (1 s)"),
        ("WARNING", "not sharing across data-parallel ranks: it could not be planned (x)"),
    ]
