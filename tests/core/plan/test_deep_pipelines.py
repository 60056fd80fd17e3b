"""Deep pipelines: lengths of segments that fill them."""

import pytest

from benchmarks.plan_growth import groups_of
from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan import step_planner
from megatron_prefix.plan.joint_forest import JointForest
from megatron_prefix.plan.prediction import predict
from megatron_prefix.plan.step_planner import Forecast, StepPlanner

SPEC = resolve("llama3-8b")


@pytest.mark.parametrize(("num_ranks", "num_chunks"), [(8, 1), (16, 1), (8, 4)])
def test_a_small_step_is_cut_until_it_fills_the_pipeline(monkeypatch, num_ranks, num_chunks):
    """It takes a quarter less time than in the two longest lengths and one between them."""
    rollouts = groups_of(64)
    owners = [number // 8 for number in range(len(rollouts))]
    times = cost_of(SPEC).in_seconds(4e14, SPEC.num_layers, num_ranks, num_chunks)

    def judge(joint, plan):
        predicted = predict(times, joint.union, joint.union_microbatch_of, plan)
        return Forecast(plan, plan, 0.0, 0.0, predicted, retains=True)

    def seconds():
        planner = StepPlanner(PrefixConfig(), times, 1, num_ranks, num_chunks, None)
        _, forest = planner.build(rollouts, owners, judge)
        joint = JointForest.alone(forest, owners)
        return judge(joint, planner.plan(joint)).prediction.prefix_seconds

    chosen = seconds()
    monkeypatch.setattr(step_planner, "FEWEST_SEGMENTS", 0)
    assert chosen < 0.75 * seconds()
