"""The cost model against counts made position by position; planning takes time in proportion to a
step (calls are counted, as times of a machine vary); segments that fill deep pipelines."""

import math
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from benchmarks.plan_growth import Case, Planner, groups_of
from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.models.config import transformer_config
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan import step_planner
from megatron_prefix.plan.cost import CostModel, Work, features, segment_work, stock_work
from megatron_prefix.plan.gate import Decision, decide, unshared, without_sharing
from megatron_prefix.plan.joint_forest import JointForest, joint_forest
from megatron_prefix.plan.layer_numbers import Payload
from megatron_prefix.plan.memory import Footprint
from megatron_prefix.plan.memory_policy import Rates, automatic
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.plan.prediction import predict
from megatron_prefix.plan.sizes import StageBytes
from megatron_prefix.plan.step_planner import Forecast, StepPlanner
from megatron_prefix.tree import Pairs, TreeOptions, build
from megatron_prefix.tree.payload_map import Form, payload_map
from tests.harness.fuzzing import rounds
from tests.harness.trees import flat_forest, flat_rollouts, interleaved, rollout_sets, tree_options

COST = CostModel.of_flops(linear=1000.0, head=70.0, attention=3.0, action_tokens=2.0)


def counted(forest, rollouts):
    """Both schedules' forward FLOPs, one position after the other."""
    stock = sum(
        2000 + sum(1070 + 3 * (position + 1) for position in range(n)) for n in forest.num_positions
    )
    prefix = 0.0
    for segment in forest.segments:
        prefix += 2000
        for span in segment.spans:
            for position in range(span.start, span.start + span.padded):
                trained = position < span.end and any(
                    rollouts[one].trained[position] for one in span.rollouts
                )
                prefix += 1000 + 70 * trained + 3 * (position + 1)
    return stock, prefix


@given(rollout_sets(), tree_options())
@settings(max_examples=rounds(30, 500))
def test_flops_are_those_of_every_position(sets, options):
    forest = build(*sets, options)
    stock, prefix = counted(forest, sets[0])
    assert COST.stock(forest) == pytest.approx(stock)
    assert COST.prefix(forest) == pytest.approx(prefix)
    assert COST.speedup(forest) == pytest.approx(stock / prefix)
    assert sum(map(COST.segment, forest.segments)) == COST.prefix(forest)


def test_the_stock_schedule_runs_the_trainers_microbatches():
    """Positions and pairs are those of the samples, overheads those of microbatches."""
    forest = flat_forest(prefix=4, suffix=2, num=3)
    assert forest.num_positions == (6, 6, 6)
    alone, packed = stock_work(forest), stock_work(forest, [0, 5, 5])
    assert alone == Work(18, 18, 3 * 21, 3, 3)
    assert packed == alone._replace(actions=2, calls=2)
    assert COST.stock(forest) - COST.stock(forest, [0, 5, 5]) == 2000
    assert COST.speedup(forest, [0, 0, 0]) < COST.speedup(forest)


@given(rollout_sets(), tree_options())
@settings(max_examples=rounds(30, 500))
def test_what_several_spans_see_counts_once(sets, options):
    forest = build(*sets, options)
    for segment in forest.segments:
        above = {
            (place, forest.segments[place.segment].spans[place.number])
            for span in segment.spans
            for place in forest.paths[span.rollouts[0]]
        }
        start = {span.rollouts: span.start for span in segment.spans}
        seen = sum(
            one.length
            for _, one in above
            if any({*members} <= {*one.rollouts} and one.end <= at for members, at in start.items())
        )
        assert segment_work(segment).seen == seen


def test_a_config_counts_as_megatron_makes_it(monkeypatch):
    """Of a real TransformerConfig and of the spec that it was made of."""
    monkeypatch.setattr("megatron.core.__version__", "0.17.1")  # older ones have no symbol G
    delta = {"experimental_attention_variant": None, "hybrid_override_pattern": "GG*-"}
    for name, fields in (
        *((name, {}) for name in ("tiny-llama", "tiny-moe", "tiny-qwen3-next", "tiny-nemotron-h")),
        ("tiny-qwen3-next", delta),
    ):
        spec = resolve(name, **fields).with_vocab(64)
        config = transformer_config(
            spec, Layout(), "float32", torch.device("cpu"), transformer_engine=False
        )
        assert cost_of(config, 64, spec.hybrid_override_pattern) == cost_of(spec)


# Seconds of actions and of whole steps ------------------------------------------------------------

PRICES = CostModel.of_flops(linear=1000.0, head=70.0, attention=3.0)
UNIT = CostModel((1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0))
"""A second a position, twice that backward: the simulator's own cost."""


def groups(num_groups=3):
    return flat_forest(prefix=40, suffix=10, num=4, num_groups=num_groups)


def predicted(times, forest, microbatch_of=None, ranks=1, chunks=1, **options):
    owners = range(len(forest.num_positions)) if microbatch_of is None else microbatch_of
    plan = make_plan(forest, ranks, num_chunks=chunks, microbatches=owners)
    return predict(times, forest, owners, plan, **options)


def test_a_step_on_one_rank_is_the_sum_of_its_actions():
    forest, times = groups(), PRICES.in_seconds(1e6, 2)
    found = predicted(times, forest, [0] * 12)
    actions = [features(segment_work(s), "FB") for s in forest.segments]
    assert found.prefix_seconds == pytest.approx(sum(map(times.of, actions)))
    stock = Work(600, 600, 12 * 50 * 51 / 2, 1, 1)
    assert found.stock_seconds == pytest.approx(times.of(features(stock, "FB")))
    assert found.speedup == pytest.approx(found.stock_seconds / found.prefix_seconds)
    forwards = predicted(times, forest, [0] * 12, forward_only=True)
    assert 3 * forwards.prefix_seconds == pytest.approx(found.prefix_seconds)
    assert forwards.speedup == pytest.approx(found.speedup)


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (4, 1), (2, 2)])
def test_waiting_counts_in_pipelines(ranks, chunks):
    forest = groups()
    plan = make_plan(forest, ranks, num_chunks=chunks)
    found = predicted(UNIT, forest, ranks=ranks, chunks=chunks)
    assert found.prefix_seconds == pytest.approx(simulate(plan).makespan)
    assert found.prefix_seconds > 3 * 240
    assert found.stock_seconds == pytest.approx(3 * 600 * (1 + (ranks - 1) / chunks / 12))


@pytest.mark.parametrize("ordered", [False, True])
def test_parallel_pipelines_share_positions_but_not_actions(ordered):
    """Two equal pipelines take as long as one of them."""
    forest = replace(groups(), ordered=ordered)
    owners = [sample // 2 for sample in range(12)]
    joint = joint_forest([forest, forest], [owners, owners])
    plan = make_plan(joint.union, microbatches=joint.union_microbatch_of)
    times = PRICES.in_seconds(1e6, 2)
    both = predict(times, joint.union, joint.union_microbatch_of, plan, num_pipelines=2)
    one = predicted(times, forest, owners)
    assert both.stock_seconds == pytest.approx(one.stock_seconds)
    assert both.prefix_seconds == pytest.approx(one.prefix_seconds)


@pytest.mark.parametrize(("mode", "share"), [("on", True), ("off", False), ("observe", False)])
def test_modes_that_do_not_ask(mode, share):
    decision = decide(PrefixConfig(mode=mode), 0.5)
    assert decision == Decision(share, f"mode {mode}", False, 0.5)


@pytest.mark.parametrize(("speedup", "share"), [(1.05, True), (1.0499, False), (9.0, True)])
def test_auto_falls_back_exactly_where_the_speedup_is_too_small(speedup, share):
    decision = decide(PrefixConfig(mode="auto"), speedup)
    assert (decision.share, decision.fallback) == (share, not share)
    assert ("below min_speedup 1.05" in decision.reason) == (not share)
    assert decide(PrefixConfig(mode="auto", min_speedup=0.01), speedup).share


def test_steps_without_sharing_are_found_in_mode_auto_only():
    rollouts, _ = flat_rollouts(40, 10, 1, 20)
    for number, rollout in enumerate(rollouts):
        rollout.inputs[0] = number
    assert without_sharing(PrefixConfig(mode="auto"), rollouts, 1)
    assert without_sharing(PrefixConfig(mode="auto"), [], 1)
    assert not without_sharing(PrefixConfig(mode="on"), rollouts, 1)
    assert not without_sharing(PrefixConfig(mode="observe"), rollouts, 1)
    assert not without_sharing(PrefixConfig(mode="auto", min_speedup=1.0), rollouts, 1)
    decision = unshared(PrefixConfig(mode="auto"))
    assert (decision.share, decision.fallback) == (False, True)


def test_what_may_be_shared_is_weighed_against_all_positions():
    """Two of twenty rollouts are equal: 1.05 times as fast at best."""
    rollouts, _ = flat_rollouts(40, 10, 1, 20)
    for number, rollout in enumerate(rollouts[1:]):
        rollout.inputs[0] = number
    rollouts[1] = rollouts[0]
    assert without_sharing(PrefixConfig(mode="auto", min_speedup=1.06), rollouts, 1)
    assert not without_sharing(PrefixConfig(mode="auto", min_speedup=1.05), rollouts, 1)


def test_unread_outputs_count_in_a_step_without_sharing():
    """An output layer of a third of the FLOPs, on a quarter of the positions: 4/3 times as fast."""
    draw, rollouts = np.random.default_rng(0), []
    for _ in range(3):
        tokens = draw.integers(0, 1000, 101)
        rollouts.append(Pairs(tokens[:-1], tokens[1:], np.arange(100) >= 75))
    for speedup, out in ((1.32, False), (1.34, True)):
        config = PrefixConfig(mode="auto", min_speedup=speedup)
        assert without_sharing(config, rollouts, 1, head=1 / 3) is out
        assert without_sharing(config, rollouts, 1)


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


def test_planning_a_step_takes_time_in_proportion():
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
def test_a_part_of_planning_takes_time_in_proportion(work, chunks):
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
