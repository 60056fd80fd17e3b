"""Memory of a plan by measured numbers: every part by hand, on a prompt with two answers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_prefix.features.measure.byte_meter import least_moment
from megatron_prefix.plan.actions import Action, Plan, policies
from megatron_prefix.plan.layer_numbers import Payload
from megatron_prefix.plan.memory import (
    LAYERS_LOADED,
    MESSAGES,
    Footprint,
    StageBytes,
    memory_table,
)
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.tree import Forest, Place, Segment, Span, TreeOptions, build
from megatron_prefix.tree.payload_map import Form
from tests.harness.trees import flat_rollouts, random_forest

KEYS = Payload(Form.POSITIONS, 3.0, 5.0)
ONE = Footprint((StageBytes(100.0, 120.0, 40.0),), ((KEYS, KEYS),), message=7.0, layers=4)
"""Of one stage with two layers that leave keys."""


def plan_of(num_ranks: int = 1, policy: str = "retain") -> Plan:
    """A prompt of 64 positions, and two answers of 16, all of them with loss."""
    prompt = Segment((Span(0, 64, 64, (0, 1)),), inner=True, scored=False)
    answers = [
        Segment((Span(64, 16, 16, (n,), Place(0, 0)),), inner=False, scored=True, trained=16)
        for n in (0, 1)
    ]
    plan = make_plan(Forest((prompt, *answers), (80, 80), (79, 79)), num_ranks)
    return replace(plan, policies=policies(plan.segments, policy))


def test_what_a_step_holds_at_its_peak() -> None:
    """In the first answer's backward: prompt, answer, K/V, gK/gV, and rows of one layer's."""
    [memory] = ONE.peaks(plan_of())
    kept, cache = 64 * 100 + 16 * (120 + 40), 2 * 64 * (3 + 5)
    level = 64 * (3 + 5)  # of one layer, while it reads the prompt
    assert memory.action == Action("B", 1) and memory.action.segment == 1
    assert (memory.kept, memory.cache, memory.moment) == (kept, cache, level)
    assert memory.peak == kept + cache + level
    assert memory.held == ((0, 6400.0), (1, 2560.0)) and memory.cache_peak == cache


@pytest.mark.parametrize(
    ("policy", "prompt", "answer"),
    [("retain", 100, 160), ("recompute", 0, 160), ("offload", 0, 160), ("recompute_act", 90, 150)],
)
def test_policies(policy: str, prompt: int, answer: int) -> None:
    footprint, plan = replace(ONE, act=10.0), plan_of(policy=policy)
    [memory] = footprint.peaks(plan)
    assert dict(memory.held)[0] == 64 * prompt
    if len(memory.held) > 1:
        assert dict(memory.held)[1] == 16 * answer
    if policy == "recompute":  # in the prompt's own backward all of it is there once more
        assert memory.action == Action("B", 0) and memory.moment == 64 * 100
    away = 64 * 100 if policy == "offload" else 0
    assert memory.staged == away
    assert footprint.saved(plan_of(policy="retain"), 0) == 6400
    assert LAYERS_LOADED / ONE.layers * 6400 == footprint.again(
        plan_of(policy="offload"), Action("B", 0), 0
    )


def test_what_a_span_and_what_a_step_has() -> None:
    numbers = ONE.stages[0]._replace(span=1000.0, before=2.0)
    [more], [less] = (replace(ONE, stages=(n,)).peaks(plan_of()) for n in (numbers, ONE.stages[0]))
    assert more.peak == less.peak + 1000 + 2 * (64 + 16 + 16)


def test_a_stage_receives_and_sends() -> None:
    """The second stage keeps what it has received, also of a recomputed segment."""
    footprint = replace(ONE, stages=ONE.stages * 2, payloads=((KEYS,), (KEYS,)))
    plan = plan_of(2, "recompute")
    first, last = (footprint.kept(plan, Action("F", 0), stage) for stage in (0, 1))
    assert (first, last) == (0, 64 * 7)
    assert all(m.moment >= MESSAGES * 7 * 64 for m in footprint.peaks(plan))


def test_ranks_share_positions_and_keys() -> None:
    """With two context-parallel ranks, which keep halves of K/V, or all of them."""
    [whole] = ONE.peaks(plan_of())
    [half] = replace(ONE, parts=2, shares=2).peaks(plan_of())
    [gathered] = replace(ONE, parts=2).peaks(plan_of())
    assert (half.kept, half.cache_peak) == (64 * 50 + 8 * 120 + 8 * 40, whole.cache_peak / 2)
    assert (gathered.kept, gathered.cache_peak) == (half.kept, whole.cache_peak)


def test_a_state_is_no_row_of_every_position() -> None:
    """A recurrent layer leaves one row a span, of megabytes; levels read rows of positions."""
    state = Payload(Form("spans"), 1e6, 2e6)
    [keys] = ONE.peaks(plan_of())
    [both] = replace(ONE, payloads=((*ONE.payloads[0], state),)).peaks(plan_of())
    assert keys.peak < both.peak < keys.peak + 10 * 3e6


def test_layers_on_the_host() -> None:
    [memory] = replace(ONE, host_layers=1).peaks(plan_of())
    assert memory.cache_peak == memory.cache_staged == 64 * (3 + 5)


@pytest.mark.parametrize("seed", range(20))
def test_the_moment_is_found_from_the_peak(seed: int) -> None:
    """Whatever the tree: what `least_moment` says of a peak that was reached gives that peak, and
    of a higher one nothing lower."""
    rng = random.Random(seed)
    plan = make_plan(random_forest(rng), rng.randint(1, 3))
    numbers = StageBytes(rng.uniform(50, 100), rng.uniform(60, 120), 30.0, 5.0)
    empty = Footprint((numbers,) * plan.num_stages, ((KEYS,),) * plan.num_stages, 2.0, 4)
    stages = (numbers._replace(moment=rng.uniform(1, 50)),) * plan.num_stages
    for rank, memory in enumerate(replace(empty, stages=stages).peaks(plan)):
        if memory.peak:
            moment = least_moment(plan, empty, rank, memory.peak)
            assert moment == pytest.approx(stages[0].moment)
            assert least_moment(plan, empty, rank, 2 * memory.peak) > moment


def test_the_table_names_what_is_held() -> None:
    rollouts, groups = flat_rollouts(1024, 256, 4, 1)
    plan = make_plan(build(rollouts, groups, TreeOptions(segment_tokens=256)))
    text = memory_table(plan, ONE.peaks(plan))
    assert text.splitlines()[1].split()[-2:] == ["2", "(retain)"]
    assert len(text.splitlines()) == 2
