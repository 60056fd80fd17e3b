"""Seconds of actions and of whole steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.cost import CostModel, Work, action_features, features, segment_work
from megatron_prefix.plan.joint_forest import joint_forest
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.plan.prediction import predict
from megatron_prefix.tree import Forest
from tests.harness.trees import flat_forest

COST = CostModel.of_flops(linear=1000.0, head=70.0, attention=3.0)
UNIT = CostModel((1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0))
"""A second a position, twice that backward: the simulator's own cost."""


def groups(num_groups: int = 3) -> Forest:
    return flat_forest(prefix=40, suffix=10, num=4, num_groups=num_groups)


def predicted(times: CostModel, forest: Forest, microbatch_of=None, ranks=1, chunks=1, **options):
    owners = range(len(forest.num_positions)) if microbatch_of is None else microbatch_of
    plan = make_plan(forest, ranks, num_chunks=chunks, microbatches=owners)
    return predict(times, forest, owners, plan, **options)


def test_flops_make_the_first_guess() -> None:
    times = COST.in_seconds(400.0, num_layers=12, num_ranks=2, num_chunks=3)
    forward, backward = times.forward, times.prices[6:]
    assert forward[:3] == pytest.approx((1000 / 800, 70 / 400, 3 / 800))
    assert forward[3] == pytest.approx(6 * 3e-4 / 3) and forward[4] == pytest.approx(6 * 5e-5)
    assert backward == tuple(2 * seconds for seconds in forward)
    frozen = COST.in_seconds(400.0, 12, 2, 3, frozen=0.75).prices
    assert frozen[:6] == forward and frozen[8:] == backward[2:]
    assert frozen[6:8] == pytest.approx((1.25 * forward[0], 1.25 * forward[1]))


def test_experts_keep_the_host_busier() -> None:
    """Ten times as long as a dense layer, in every layer that has them."""
    specs = (resolve("tiny-moe", num_moe_experts=None), resolve("tiny-moe", moe_layer_freq=2))
    prices = [cost_of(spec, 0).in_seconds(1e9, spec.num_layers).forward for spec in specs]
    assert [one.actions for one in prices] == pytest.approx([4 * 3e-4, 4 * 3e-4 * 5.75])
    assert prices[0].calls == prices[1].calls


def test_keys_that_are_made_again() -> None:
    """An ancestor's keys are made in a forward, again in its backward, and have gradients there."""
    cost = CostModel.of_flops(linear=0.0, head=0.0, attention=0.0, expansion=5.0)
    assert [cost.prefix(groups(1)), cost.prices[-1] / cost.forward.seen] == [4 * 40 * 5.0, 3]
    times = cost.in_seconds(10.0, num_layers=12, num_ranks=2, frozen=1.0)
    assert (times.forward.seen, times.prices[-1]) == (0.25, 0.5)


def test_a_step_on_one_rank_is_the_sum_of_its_actions() -> None:
    forest, times = groups(), COST.in_seconds(1e6, 2)
    found = predicted(times, forest, [0] * 12)
    actions = [features(segment_work(s), "FB") for s in forest.segments]
    assert found.prefix_seconds == pytest.approx(sum(map(times.of, actions)))
    stock = Work(600, 600, 12 * 50 * 51 / 2, 1, 1)
    assert found.stock_seconds == pytest.approx(times.of(features(stock, "FB")))
    assert found.speedup == pytest.approx(found.stock_seconds / found.prefix_seconds)
    forwards = predicted(times, forest, [0] * 12, forward_only=True)
    assert 3 * forwards.prefix_seconds == pytest.approx(found.prefix_seconds)
    assert forwards.speedup == pytest.approx(found.speedup)


def test_factors_of_whole_steps() -> None:
    found = predicted(replace(UNIT, stock_factor=2.0, prefix_factor=3.0), groups())
    assert (found.stock_seconds, found.prefix_seconds) == (2 * 3 * 600, 3 * 3 * 240)
    assert found.stock_features[0] == 600  # what is measured is compared without them


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (4, 1), (2, 2)])
def test_waiting_counts_in_pipelines(ranks, chunks) -> None:
    forest = groups()
    plan = make_plan(forest, ranks, num_chunks=chunks)
    found = predicted(UNIT, forest, ranks=ranks, chunks=chunks)
    assert found.prefix_seconds == pytest.approx(simulate(plan).makespan)
    assert found.prefix_seconds > 3 * 240
    assert found.stock_seconds == pytest.approx(3 * 600 * (1 + (ranks - 1) / chunks / 12))


def test_recomputed_segments_run_forward_twice() -> None:
    forest = groups(1)
    plan = make_plan(forest)
    plan = replace(plan, policies=("recompute",) + ("retain",) * (len(forest.segments) - 1))
    owners = range(4)
    assert predict(UNIT, forest, owners, plan).prefix_seconds == 3 * 80 + 40
    assert predict(UNIT, forest, owners, plan, forward_only=True).prefix_seconds == 80


@pytest.mark.parametrize("ordered", [False, True])
def test_parallel_pipelines_share_positions_but_not_actions(ordered) -> None:
    """Two equal pipelines take as long as one of them."""
    forest = replace(groups(), ordered=ordered)
    owners = [sample // 2 for sample in range(12)]
    joint = joint_forest([forest, forest], [owners, owners])
    plan = make_plan(joint.union, microbatches=joint.union_microbatch_of)
    times = COST.in_seconds(1e6, 2)
    both = predict(times, joint.union, joint.union_microbatch_of, plan, num_pipelines=2)
    one = predicted(times, forest, owners)
    assert both.stock_seconds == pytest.approx(one.stock_seconds)
    assert both.prefix_seconds == pytest.approx(one.prefix_seconds)


def test_a_step_of_nothing() -> None:
    empty = Forest((), (), ())
    assert predict(UNIT, empty, (), Plan((), ((),), 1)).speedup == 1.0


def test_features_of_actions() -> None:
    """A model chunk has its share of the layers, the last one all of the output layer."""
    forest = groups(1)
    plan = make_plan(forest, 2, num_chunks=2)
    wave = len(forest.segments) - 1
    work = np.array(segment_work(forest.segments[wave]))
    half = work * (0.5, 0, 0.5, 1, 0.5, 0.5)
    assert action_features(plan, Action("F", wave, 1), 0).tolist() == [*half, *[0] * 6]
    last = work * (0.5, 1, 0.5, 1, 0.5, 0.5)
    assert action_features(plan, Action("B", wave, 1), 1).tolist() == [*[0] * 6, *last]
    plan = replace(plan, policies=("recompute",) * len(forest.segments))
    assert action_features(plan, Action("B", wave, 1), 1).tolist() == [*last, *last]
    assert action_features(plan, Action("F", wave, 1), 1).tolist() == [*last, *[0] * 6]
