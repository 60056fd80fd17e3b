"""Planning takes time in proportion to a step: calls are counted, as times of a machine vary; and
lengths of segments that fill deep pipelines."""

import math
import sys
from functools import partial

import pytest

from benchmarks.plan_growth import Case, Planner, groups_of
from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan import step_planner
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.joint_forest import JointForest
from megatron_prefix.plan.layer_numbers import Payload
from megatron_prefix.plan.memory import Footprint, StageBytes
from megatron_prefix.plan.memory_policy import Rates, automatic
from megatron_prefix.plan.prediction import predict
from megatron_prefix.plan.step_planner import Forecast, StepPlanner
from megatron_prefix.tree import TreeOptions, build
from megatron_prefix.tree.payload_map import Form, payload_map
from tests.harness.trees import flat_rollouts, interleaved

MOST = 1.15
"""Largest exponent of calls in the size of a step."""
ROLLOUTS = partial(groups_of, prompt=128, mean=96)
STEP = Case("", (256, 1024), pp=4, pack=2048, rollouts=ROLLOUTS, options={"segment_tokens": 2048})


def num_calls(work):
    """Calls of Python's and of C's functions, and steps of generators."""
    count = 0

    def counted(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def exponent(sizes, work_of):
    """Of the calls in the sizes; what `work_of` does itself is not counted."""
    first, second = (num_calls(work_of(size)) for size in sizes)
    return math.log(second / first) / math.log(sizes[1] / sizes[0])


def all_alive(num_groups, num_chunks=1):
    """A plan whose prompts and answers, in chunks, are all alive at once."""
    options = TreeOptions(segment_tokens=64, chunk_tokens=32, min_gain=0)
    return interleaved(build(*flat_rollouts(64, 8, 2, num_groups), options), 2, num_chunks)


def footprint(plan):
    keys = Payload(Form.POSITIONS, 2.0, 4.0)
    numbers = StageBytes(64.0, 64.0, 16.0, 0.0, 8.0)
    return Footprint((numbers,) * plan.num_stages, ((keys,),) * plan.num_stages, 8.0, 1)


def test_a_step():
    """Segments of several lengths, their plans, peaks of memory, and policies that lower them."""
    assert exponent(STEP.sizes, lambda n: partial(Planner(STEP).plan, ROLLOUTS(n))) < MOST


def peaks(plan):
    return partial(footprint(plan).peaks, plan)


def policies(plan):
    free = 0.7 * max(memory.peak for memory in footprint(plan).peaks(plan))
    cost = CostModel.of_flops(1.0, 1.0, 0.0)
    return partial(automatic, plan, footprint(plan), cost, Rates(1.0, 1.0), free, False)


def places(plan):
    return partial(payload_map, plan.segments, plan.actions_of(0, 0))


@pytest.mark.parametrize(("work", "chunks"), [(peaks, 1), (peaks, 2), (policies, 1), (places, 1)])
def test_a_part_of_it(work, chunks):
    assert exponent((64, 256), lambda size: work(all_alive(size, chunks))) < MOST


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
