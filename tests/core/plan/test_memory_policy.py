"""Memory "auto": which segments give way, and for what price."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.predict.execution import Execution
from megatron_prefix.lab.predict.footprint import Footprint
from megatron_prefix.lab.predict.model import footprint_of
from megatron_prefix.lab.predict.peak_memory import predict_memory
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.actions import Plan, policies
from megatron_prefix.plan.cost import AGAIN
from megatron_prefix.plan.memory_policy import Rates, automatic, leaner
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.tree import TreeOptions, build
from tests.harness import steps
from tests.harness.failures import CONFIG, assert_same, items, run
from tests.harness.one_rank import one_rank, small_model
from tests.harness.predicted import predicted_bytes
from tests.harness.steps import Contract
from tests.harness.trees import flat_rollouts, random_forest

SPEC = resolve("llama3-8b")
FOOTPRINT, COST = footprint_of(SPEC, Execution()), cost_of(SPEC)
EVERYTHING = replace(FOOTPRINT, act=0.0)  # nothing that an activation function gives can be dropped
FAST, SLOW = Rates(5e14, 1e13), Rates(5e14, 1e9)


def plan_of(prompt: int = 10240, response: int = 2048, num: int = 8, num_ranks: int = 1,
            num_groups: int = 1, chunk_tokens: int = 0) -> Plan:  # fmt: skip
    rollouts, groups = flat_rollouts(prompt, response, num, num_groups)
    options = TreeOptions(segment_tokens=response, chunk_tokens=chunk_tokens)
    return make_plan(build(rollouts, groups, options), num_ranks)


def peak(plan: Plan, chosen: tuple[str, ...], footprint: Footprint = FOOTPRINT) -> float:
    return max(one.peak for one in predict_memory(replace(plan, policies=chosen), footprint))


def chosen(plan: Plan, free: float, rates: Rates = FAST, may_offload: bool = True, **more: Any):
    return automatic(plan, more.get("footprint", FOOTPRINT), COST, rates, free, may_offload)


def test_all_is_retained_where_it_fits() -> None:
    plan = plan_of()
    assert chosen(plan, peak(plan, ())) == ()
    assert chosen(plan, peak(plan, ()) - 1) != ()


def test_the_cheaper_way_is_taken() -> None:
    plan = plan_of()
    free = peak(plan, ()) - 1
    assert set(chosen(plan, free, FAST)) == {"offload", "retain"}
    assert set(chosen(plan, free, SLOW)) == {"recompute_act"}
    assert set(chosen(plan, free, FAST, may_offload=False)) == {"recompute_act"}
    for more in (dict(rates=SLOW), dict(may_offload=False)):
        assert set(chosen(plan, free, footprint=EVERYTHING, **more)) == {"recompute", "retain"}


def test_activations_are_dropped_before_anything_runs_again() -> None:
    plan = plan_of()
    light = policies(plan.segments, "recompute_act")
    fits = peak(plan, light)
    assert set(light) == {"recompute_act"}
    # A prompt's last MLP does not run; one layer of a wave comes back where its logits were.
    saved = 14336 * 2 * (31 * 10240 + 32 * 2048)
    assert peak(plan, ()) - fits == pytest.approx(saved)
    assert chosen(plan, fits, SLOW) == light
    assert chosen(plan, fits - 1, SLOW, may_offload=False)[0] == "recompute"


def test_where_neither_is_enough_both_are_done() -> None:
    plan = plan_of(prompt=2048, response=10240, num=3)
    both = ("recompute", *["recompute_act"] * 3)
    assert chosen(plan, peak(plan, both), SLOW) == both


@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("prompt", [512, 4096, 10240])
def test_nothing_costs_more_because_activations_can_be_dropped(
    prompt: int, num_groups: int
) -> None:
    """As where they cannot: what runs again is at most that, as long as it fits."""
    plan = plan_of(prompt, num_groups=num_groups)
    least, most = peak(plan, policies(plan.segments, "recompute")), peak(plan, ())

    def again(found: tuple[str, ...]) -> float:
        pairs = zip(found, plan.segments, strict=True)
        return sum(AGAIN.get(policy, 0.0) * COST.segment(one) for policy, one in pairs)

    for share in (0.0, 0.2, 0.5, 0.9):
        free = least + share * (most - least)
        found = chosen(plan, free, SLOW, may_offload=False)
        without = chosen(plan, free, SLOW, may_offload=False, footprint=EVERYTHING)
        assert peak(plan, found) <= free and peak(plan, without) <= free
        assert again(found) <= again(without)


def test_a_short_prompt_again_is_cheaper_than_all_activations() -> None:
    plan = plan_of(prompt=256, num=16)
    least = peak(plan, policies(plan.segments, "recompute"))
    assert set(chosen(plan, least, SLOW)) == {"recompute", "retain"}


def test_a_link_hides_only_what_fits_behind_the_computation() -> None:
    """Stores behind all waves, loads behind the last wave's backward and the prompt's own."""
    plan = plan_of(num_groups=1, num=16)
    size = 10240 * FOOTPRINT.inner * 32
    prompt, *waves = (COST.segment(segment) / FAST.flops for segment in plan.segments)
    free = peak(plan, ()) - 1
    loading = 2 * (prompt + waves[-1])
    assert chosen(plan, free, Rates(FAST.flops, 1.01 * size / loading))[0] == "offload"
    # Up to the time of the forward that "recompute" would run again, waiting is cheaper.
    for share, way in ((1.01, "offload"), (0.99, "recompute")):
        rates = Rates(FAST.flops, share * size / (loading + prompt))
        assert chosen(plan, free, rates, footprint=EVERYTHING)[0] == way


def test_only_as_many_segments_give_way_as_must() -> None:
    plan = plan_of(chunk_tokens=1024)
    most, least = peak(plan, ()), peak(plan, policies(plan.segments, "recompute"))
    counts = []
    for share in (0.9, 0.6, 0.3):
        found = chosen(plan, least + share * (most - least), SLOW, footprint=EVERYTHING)
        assert peak(plan, found) <= least + share * (most - least)
        counts.append(found.count("recompute"))
    assert 0 < counts[0] < counts[1] < counts[2] < 10


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_what_another_segment_makes_needless_is_retained(share: float) -> None:
    """In a pipeline a recomputed prompt's own backward can be the peak, with others still held."""
    plan = plan_of(16384, 64, 8, num_ranks=4, num_groups=4)
    footprint = replace(footprint_of(SPEC, Execution(num_stages=4)), act=0.0)
    most, least = (peak(plan, way, footprint) for way in ((), policies(plan.segments, "recompute")))
    free = least + share * (most - least)
    found = chosen(plan, free, may_offload=False, footprint=footprint)
    assert peak(plan, found, footprint) <= free
    again = [index for index, one in enumerate(found) if one == "recompute"]
    assert 0 < len(again) < 4
    for index in again[:1]:  # what is first is needed
        less = (*found[:index], "retain", *found[index + 1 :])
        assert peak(plan, less, footprint) > free


def test_a_prefix_too_large_to_recompute_is_offloaded() -> None:
    """Recomputed as a whole it is as large as ever; offloaded a few layers come at a time."""
    plan = plan_of(prompt=40960, response=1024, num=4)
    lean = policies(plan.segments, "recompute")
    free = 0.5 * peak(plan, lean)
    assert chosen(plan, free, SLOW)[0] == "offload"
    assert peak(plan, chosen(plan, free, SLOW)) <= free


@pytest.mark.parametrize("seed", range(30))
def test_whatever_the_tree_the_peak_fits_or_nothing_leaner_does(seed: int) -> None:
    rng = random.Random(seed)
    plan = make_plan(random_forest(rng), rng.randint(1, 4))
    small = footprint_of(resolve("tiny-llama"), Execution(num_stages=plan.num_ranks), 64)
    light = replace(plan, policies=policies(plan.segments, "recompute_act"))
    lean = leaner(light) or light
    least = peak(plan, lean.policies, small)
    for share in (0.0, 0.5, 0.95):
        free = share * peak(plan, (), small)
        found = chosen(plan, free, rng.choice([FAST, SLOW]), footprint=small)
        assert len(found) in (0, len(plan.segments))
        if found:
            waves = [p for p, s in zip(found, plan.segments, strict=True) if not s.inner]
            assert set(waves) <= {"retain", "recompute_act"}
        assert peak(plan, found, small) <= max(free, least, peak(plan, (), small))
        if free >= least:
            assert peak(plan, found, small) <= max(free, 1.0)


def test_the_leanest_plan_has_nothing_leaner() -> None:
    plan = plan_of(1024, 256, 4)
    lean = leaner(plan)
    assert lean is not None and lean.policies == policies(plan.segments, "recompute")
    assert leaner(lean) is None
    assert leaner(plan_of(16, 16, 1)) is None  # no inner segments


# --- In a step ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def test_a_step_takes_what_fits_its_budget() -> None:
    model = small_model()
    expected = run(PrefixSchedule(CONFIG), model)
    found = {}
    for budget in (1.0, 1e-3, 2e-4, 1e-6):
        config = replace(CONFIG, memory="auto", memory_budget_gb=budget)
        schedule = PrefixSchedule(config)
        with predicted_bytes():
            assert_same(run(schedule, model), expected)
        report = schedule.report
        assert report is not None and report.memory is not None
        found[budget] = set(report.plan.policies), report.memory.peak
    assert found[1.0][0] == set()
    assert found[1e-6][0] == {"recompute", "recompute_act"}
    assert found[1e-6][1] < found[1.0][1]


def test_without_a_budget_it_is_what_the_machine_has_free() -> None:
    schedule = PrefixSchedule(replace(CONFIG, memory="auto"))
    run(schedule, small_model())
    assert schedule.report is not None and schedule.report.plan.policies == ()


def test_without_gradients_nothing_is_chosen() -> None:
    config = PrefixConfig(**{**vars(CONFIG), "memory": "auto", "memory_budget_gb": 1e-6})
    schedule, model = PrefixSchedule(config), small_model()
    with torch.no_grad():
        steps.call(schedule, Contract().step, model, items(), forward_only=True)
    assert schedule.report is not None and schedule.report.plan.policies == ()
