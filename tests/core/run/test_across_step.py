"""Whether prompts cross data-parallel ranks: all ranks decide alike, and one that fails says so."""

import contextlib
import functools
import logging
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.errors import CannotShare, StepFailed
from megatron_prefix.features.across import step
from megatron_prefix.features.across.communicator import Communicator
from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.refusals import table
from megatron_prefix.run import planning
from megatron_prefix.run.request import Backoff
from tests.harness import steps
from tests.harness.one_rank import small_model
from tests.harness.predicted import predicted_bytes
from tests.harness.ranks import run_ranks

AUTO = PrefixConfig(mode="auto", min_gain=0, min_speedup=0.01, kernel="math")
TOLD = replace(AUTO, mode="on", across_ranks="auto")
"""In mode "on" it is asked for."""
SOON_S = 60.0
FAILS = 1
"""The rank that fails."""


def step_of(number, prompts):
    """A rank's microbatches, one a prompt: each rank has a rollout of all of them."""
    items = []
    for prompt in range(prompts):
        first = np.random.default_rng(prompt).integers(0, 60, 400)
        draw = np.random.default_rng([prompt, number])
        items += steps.answers(draw, [first], 12, 399, prompt, prompt)
    return items


def gradients(schedule, model, items):
    found = steps.run(schedule, steps.Contract().step, model, items).gradients
    steps.zero_gradients(model)
    return found


class Found(NamedTuple):
    """What a rank has found in some steps."""

    said: list[str]  # why nothing crossed in each, or what it raised
    seconds: float
    received: int  # positions, in the last one


nothing = contextlib.nullcontext
"""Spoils nothing."""


def slow_messages():
    return mock.patch.object(Communicator, "measured", return_value=1.0)


def failing(module, name):
    """Spoils one rank: a function raises there."""
    return lambda: (
        mock.patch.object(module, name, _raise) if dist.get_rank() == FAILS else nothing()
    )


def _raise(*_, **__):
    raise KeyError("spoiled")


def failing_behind_the_forecast():
    """Spoils one rank: its proposal raises when ranks have agreed that payloads cross."""
    stock, calls = planning.Planning.proposed, []

    def proposed(*args, **options):
        calls.append(args)
        return stock(*args, **options) if len(calls) % 2 else _raise()

    fails = dist.get_rank() == FAILS
    return mock.patch.object(planning.Planning, "proposed", proposed) if fails else nothing()


PLACES = {
    "before ranks tell": (step, "beginnings_of"),
    "what others ask": (step, "answered"),
    "what is in common": (step, "common_spans"),
    "whether it pays": (step.Across, "pays"),
    "the forecast": (planning.Planning, "forecast"),
}
ON = replace(AUTO, mode="on", across_ranks="on")
WAYS = {
    "by default": (AUTO, nothing), "asked for": (TOLD, nothing),
    "turned off": (replace(AUTO, across_ranks="off"), nothing),
    "not asked for": (replace(AUTO, mode="on"), nothing),
    "nothing in common": (replace(AUTO, min_gain=1000), nothing), "slow": (AUTO, slow_messages),
    "slow, asked for": (TOLD, slow_messages),
    "no memory": (replace(AUTO, memory="retain", memory_budget_gb=1e-6), predicted_bytes),
    **{place: (AUTO, failing(*where)) for place, where in PLACES.items()},
    "fails, must cross": (ON, failing(*PLACES["what is in common"])),
    "fails behind the forecast": (TOLD, failing_behind_the_forecast),
}  # fmt: skip
"""Configurations, and what spoils a step."""
NUM_STEPS = 2
"""One more where messages are slow."""


def run_each(layout, names, num=NUM_STEPS):
    """A rank's part of some steps in each way."""
    runtime.initialize(layout)
    Communicator.measured = lambda _: 1e15  # the rank's own process
    model = small_model(dtype=torch.float64, layout=layout)
    items = step_of(dist.get_rank() % layout.dp, prompts=2)
    stock = gradients(stock_schedule(), model, items)
    found = {}
    for name in names:
        config, spoil = WAYS[name]
        with spoil():
            more = spoil is slow_messages
            found[name] = steps_of(config, model, items, stock, num + more)
    return found


def steps_of(config, model, items, stock, num):
    """Gradients are stock's."""
    schedule = PrefixSchedule(config)
    begin, said = time.monotonic(), []
    for _ in range(num):
        try:
            ours = gradients(schedule, model, items)
        except (StepFailed, KeyError) as error:
            said.append(f"{type(error).__name__}: {error}")
            continue
        steps.assert_gradients(ours, stock, sum(i["tokens"].numel() for i in items))
        said.append(schedule.report.why_alone)
    crossed = schedule.report.crossed if schedule.report else None
    return Found(said, time.monotonic() - begin, crossed.received_tokens if crossed else 0)


SLOW = ("slow", "slow, asked for")


@functools.cache
def on_two_ranks(slow=False):
    """How fast messages are is measured once."""
    return run_ranks(2, run_each, Layout(dp=2), [n for n in WAYS if (n in SLOW) == slow])


@pytest.mark.parametrize("way", ["by default", "asked for"])
def test_prompts_cross(way):
    ranks = [found[way] for found in on_two_ranks()]
    assert [rank.said for rank in ranks] == [[""] * NUM_STEPS] * 2
    assert sum(rank.received for rank in ranks) >= 2 * 390


ALONE = {
    "turned off": "", "not asked for": "", "nothing in common": step.NOTHING, "slow": step.SLOWER,
    "slow, asked for": step.SLOWER, "no memory": "more memory than it may",
}  # fmt: skip
"""Why nothing crosses."""


@pytest.mark.parametrize("way", ALONE)
def test_each_rank_is_alone_where_crossing_does_not_pay(way):
    """After two such steps ranks do not ask for a while."""
    for rank in (found[way] for found in on_two_ranks(way in SLOW)):
        assert all(ALONE[way] in said for said in rank.said[:2]) and not rank.received
        assert way != "slow" or rank.said[2] == step.RESTS


def test_ranks_ask_again_after_a_while():
    backoff, asked = Backoff(), []
    for number in range(60):
        if not backoff.skips():
            asked.append(number)
            backoff.note(useful=number == 26)
            if backoff.is_due:
                backoff.begin()
    assert asked == [0, 1, 26, 27, 28, 53], "what crossed once begins anew"


def assert_told(ranks, num_pipelines):
    """First stages know which rank has failed, and nobody waits for another for ever."""
    first = [rank.said for rank in ranks if rank.said[0]]
    assert len(first) == num_pipelines
    assert all("rank 1: KeyError: 'spoiled'" in said[0] for said in first)
    assert max(rank.seconds for rank in ranks) < SOON_S
    assert sum(rank.received for rank in ranks) == 0


@pytest.mark.parametrize("place", PLACES)
def test_one_rank_that_fails_to_decide_leaves_each_alone(place):
    assert_told([found[place] for found in on_two_ranks()], 2)


def test_so_does_one_of_several_stages():
    for_all = ["what is in common", "the forecast"]
    ranks = run_ranks(4, run_each, Layout(dp=2, pp=2), for_all, 1)
    for place in for_all:
        assert_told([found[place] for found in ranks], 2)


@pytest.mark.parametrize("way", ["fails, must cross", "fails behind the forecast"])
def test_all_ranks_end_with_the_reason_of_one(way):
    """Where prompts must cross, and where ranks have agreed that they do."""
    other, failed = (found[way] for found in on_two_ranks())
    assert failed.said == ["KeyError: 'spoiled'"] * NUM_STEPS
    heard = "StepFailed: the step ends on all ranks: rank 1: KeyError: 'spoiled'"
    assert other.said == [heard] * NUM_STEPS
    assert max(other.seconds, failed.seconds) < SOON_S


GROUP = SimpleNamespace(size=lambda: 2)
GATHERING = [SimpleNamespace(ddp_config=SimpleNamespace(overlap_param_gather=True))]
FREE = {"experts": None, "models": (), "forward_only": False, "reduces": True, "config": None}


def asked(mode, across, together=True, gathers_tokens=False, **has):
    model = SimpleNamespace(looks_ahead=False, gathers_tokens=gathers_tokens)
    rank = SimpleNamespace(
        **{"model": model, "data_ranks": GROUP, "siblings": GROUP, **FREE, **has}
    )
    return step.why_alone(PrefixConfig(mode=mode, across_ranks=across), rank, together=together)


def test_ranks_decide_together_in_mode_auto_unless_told():
    wanted = {
        ("auto", None): None, ("auto", "on"): None, ("auto", "off"): "", ("on", None): "",
        ("on", "auto"): None, ("on", "on"): None, ("observe", None): "", ("observe", "on"): "",
    }  # fmt: skip
    assert {both: asked(*both) for both in wanted} == wanted
    assert asked("auto", None, siblings=SimpleNamespace(size=lambda: 1)) == ""


def test_what_is_in_the_way_is_said():
    assert asked("auto", None, together=False) == step.APART
    assert (
        asked("auto", None, models=GATHERING) == f"{table.ACROSS_GATHERS.name} is not supported yet"
    )
    with pytest.raises(CannotShare, match=table.ACROSS_GATHERS.name):
        asked("auto", "on", models=GATHERING)
    with pytest.raises(CannotShare, match=table.ACROSS_EXPERTS.name):
        asked("on", "on", experts=GROUP, gathers_tokens=True)
    with pytest.raises(CannotShare, match=table.ACROSS_UNREDUCED.name):
        asked("on", "on", reduces=False)
    assert asked("on", "on", reduces=False, forward_only=True) is None
    kinds = {"experimental_attention_variant": "dsa"}, {}
    configs = [SimpleNamespace(dsa_indexer_loss_coeff=0.5, **kind) for kind in kinds]
    said = f"{table.ACROSS_INDEXER.name} is not supported yet"
    assert [asked("auto", None, config=config) for config in configs] == [said, None]


def test_why_ranks_are_alone_is_logged_once_for_every_reason(caplog):
    rank = SimpleNamespace(data_ranks=None)
    rank.groups = SimpleNamespace(tp=SimpleNamespace(rank=lambda: 0))
    told = set()
    with caplog.at_level(logging.INFO):
        for why in ("", *(f"{step.SLOWER} ({n} s)" for n in (1, 2)), "it could not be planned (x)"):
            step.tell_alone(why, rank, told)
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("INFO", f"not sharing across data-parallel ranks: {step.SLOWER} (1 s)"),
        ("WARNING", "not sharing across data-parallel ranks: it could not be planned (x)"),
    ]
