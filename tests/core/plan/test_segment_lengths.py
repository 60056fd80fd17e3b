"""`segment_tokens` "auto": the fastest length that fits."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_prefix.config import SEGMENT_TOKENS, PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.joint_forest import JointForest
from megatron_prefix.plan.prediction import Prediction
from megatron_prefix.plan.step_planner import Forecast, StepPlanner, fitting
from tests.harness.trees import flat_rollouts

COST = CostModel.of_flops(1.0, 1.0, 0.0)


def forecast(plan: Plan, over: float, seconds: float, *, retains: bool) -> Forecast:
    """Of a plan that is over its limit by so much, and takes so long."""
    none = np.zeros(0)
    return Forecast(plan, plan, over, 0.0, Prediction(none, none, 0.0, seconds), retains)


def chosen(
    room: int,
    per_action: float,
    given: int | str = "auto",
    answer: int = 900,
    align: int = 1,
    most: int | None = None,
) -> int:
    """The longest segment, where at most `room` positions fit and an action costs so much."""
    rollouts, _ = flat_rollouts(100, answer, 4, 20)
    planner = StepPlanner(PrefixConfig(segment_tokens=given), COST, align, 1, 1, None)

    def judge(_: JointForest, plan: Plan) -> Forecast:
        longest = max(segment.padded_length for segment in plan.segments)
        seconds = sum(s.padded_length + per_action for s in plan.segments)
        return forecast(plan, max(0, longest - room), seconds, retains=True)

    _, forest = planner.build(rollouts, list(range(len(rollouts))), judge, most=most)
    return max(segment.padded_length for segment in forest.segments)


def test_the_longest_that_fits_where_actions_cost() -> None:
    assert 8192 < chosen(room=20000, per_action=500.0) <= 16384
    assert 2048 < chosen(room=5000, per_action=500.0) <= 4096


@pytest.mark.parametrize("given", [8192, "auto"])
def test_none_is_longer_than_the_most(given: int | str) -> None:
    assert 2048 < chosen(room=20000, per_action=500.0, given=given, most=3000) <= 3000


def test_the_shortest_where_nothing_fits() -> None:
    assert chosen(room=10, per_action=500.0) <= SEGMENT_TOKENS[0]


def test_a_given_length_is_halved_only_to_keep_the_limit() -> None:
    assert 4096 < chosen(room=8192, per_action=-2000.0, given=8192) <= 8192
    assert 2048 < chosen(room=5000, per_action=500.0, given=8192) <= 4096
    assert 512 < chosen(room=10, per_action=500.0, given=8192) <= 1024
    assert 1024 < chosen(room=10, per_action=500.0, given=1900) <= 1900


@pytest.mark.parametrize("given", [8192, "auto"])
def test_a_length_between_two_where_only_padding_does_not_fit(given: int | str) -> None:
    """2,049 positions are 2,050 where two ranks share them."""

    def longest(room: int) -> int:
        return chosen(room, 500.0, given, answer=2049, align=2)

    assert longest(room=4100) == 4100
    assert longest(room=4099) == 2050


@pytest.mark.parametrize("given", [0, 8192, "auto"])
def test_nothing_is_joined_where_only_what_waits_keeps_the_limit(given: int | str) -> None:
    """A joined segment can be neither recomputed nor offloaded until its backward."""
    rollouts, _ = flat_rollouts(900, 100, 4, 4)
    owners = [rollout // 8 for rollout in range(16)]
    planner = StepPlanner(PrefixConfig(segment_tokens=given), COST, 1, 1, 1, None, joins=True)
    for over in (0.0, 1.0):

        def judge(joint: JointForest, plan: Plan, over: float = over) -> Forecast:
            joined = any(segment.joined >= 0 for segment in plan.segments)
            num = len(joint.forest.segments)
            return forecast(plan, over if joined else 0.0, float(num), retains=joined)

        _, forest = planner.build(rollouts, owners, judge)
        joined = any(segment.joined >= 0 for segment in forest.segments)
        assert joined is (over == 0.0)
        assert any(segment.waits for segment in forest.segments) is not joined


def test_no_other_word() -> None:
    with pytest.raises(UserError, match="segment_tokens is 'all'"):
        PrefixConfig(segment_tokens="all")


def test_stages_run_less_ahead_where_that_alone_keeps_the_limit() -> None:
    """The quickest plan that does; with room the one that runs ahead as far as is allowed."""
    rollouts, _ = flat_rollouts(100, 900, 4, 20)
    owners = list(range(len(rollouts)))
    planner = StepPlanner(PrefixConfig(segment_tokens=1000), COST, 1, 4, 2, None)
    _, forest = planner.build(rollouts, owners)
    joint = JointForest.alone(forest, owners)

    def chosen(room: float) -> tuple[float, float]:
        timelines = {id(plan): (plan, simulate(plan)) for plan in planner.plans(joint)}
        best = fitting(
            forecast(plan, max(0.0, t.peak_live_positions - room), t.makespan, retains=True)
            for plan, t in timelines.values()
        )
        return timelines[id(best.plan)][1].peak_live_positions, best.prediction.prefix_seconds

    (most, soonest), (least, latest) = chosen(1e9), chosen(0.0)
    assert least < 0.7 * most and soonest < latest
    middle, seconds = chosen(most - 1)
    assert least < middle < most and soonest <= seconds < latest
    assert chosen(least) == (least, latest)
