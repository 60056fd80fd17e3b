"""The cost model against counts made position by position."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.models.config import transformer_config
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.cost import CostModel, Work, features, segment_work, stock_work
from megatron_prefix.plan.gate import Decision, decide, unshared, without_sharing
from megatron_prefix.plan.joint_forest import joint_forest
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.plan.prediction import predict
from megatron_prefix.tree import Pairs, build
from tests.harness.fuzzing import rounds
from tests.harness.trees import flat_forest, flat_rollouts, rollout_sets, tree_options

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
    draw = np.random.default_rng(0)
    rollouts = []
    for _ in range(3):
        tokens = draw.integers(0, 1000, 101)
        rollouts.append(Pairs(tokens[:-1], tokens[1:], np.arange(100) >= 75))
    for speedup, out in ((1.32, False), (1.34, True)):
        config = PrefixConfig(mode="auto", min_speedup=speedup)
        assert without_sharing(config, rollouts, 1, head=1 / 3) is out
        assert without_sharing(config, rollouts, 1)
