"""Which schedule a step gets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.gate import Decision, decide, unshared, without_sharing
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.plan.prediction import predict
from megatron_prefix.tree import Forest, Pairs, TreeOptions, build
from tests.harness.trees import flat_rollouts


def forest_of(num: int, prefix: int = 400) -> Forest:
    rollouts, groups = flat_rollouts(prefix, 100, num, 1)
    return build(rollouts, groups, TreeOptions())


def decided(config: PrefixConfig, forest: Forest, times: CostModel, microbatch_of) -> Decision:
    plan = make_plan(forest, microbatches=microbatch_of)
    return decide(config, predict(times, forest, microbatch_of, plan).speedup)


@pytest.mark.parametrize(("mode", "share"), [("on", True), ("off", False), ("observe", False)])
def test_modes_that_do_not_ask(mode, share) -> None:
    decision = decide(PrefixConfig(mode=mode), 0.5)
    assert decision == Decision(share, f"mode {mode}", False, 0.5)


@pytest.mark.parametrize(("speedup", "share"), [(1.05, True), (1.0499, False), (9.0, True)])
def test_auto_falls_back_exactly_where_the_speedup_is_too_small(speedup, share) -> None:
    decision = decide(PrefixConfig(mode="auto"), speedup)
    assert (decision.share, decision.fallback) == (share, not share)
    assert ("below min_speedup 1.05" in decision.reason) == (not share)
    assert decide(PrefixConfig(mode="auto", min_speedup=0.01), speedup).share


def test_the_baseline_is_the_trainers_packing() -> None:
    """Small groups: many segments beat single rollouts, and lose to a few full microbatches."""
    times = cost_of(resolve("qwen3-8b", num_layers=12), 0).in_seconds(4e14, 12)
    rollouts, groups = flat_rollouts(100, 30, 4, 60)
    forest = build(rollouts, groups, TreeOptions())
    config = PrefixConfig(mode="auto", min_speedup=1.0)
    assert decided(config, forest, times, range(240)).share
    packed = [rollout // 120 for rollout in range(240)]
    assert decided(config, forest, times, packed).share == (len(forest.segments) < 10)
    slow = replace(times, prices=tuple(np.array(times.prices) * ([1, 1, 1, 500, 1, 1] * 2)))
    assert not decided(config, forest, slow, [0] * 240).share


def test_vocabulary_and_experts_decide() -> None:
    """Prompts have no loss: a large output layer is work that sharing saves; experts are work that
    a dense count of their layers would not see."""
    forest = forest_of(2, prefix=150)
    config = PrefixConfig(mode="auto")

    def cost(vocab_size: int, width: int) -> CostModel:
        spec = resolve(
            "tiny-llama", num_layers=2, hidden_size=256, num_attention_heads=4, kv_channels=64,
            num_query_groups=4, ffn_hidden_size=width,
        )  # fmt: skip
        return cost_of(spec, vocab_size).in_seconds(5e10, 2)

    def speedup(vocab_size: int, width: int) -> float:
        found = decided(config, forest, cost(vocab_size, width), [0, 0])
        return found.predicted_speedup

    plain = speedup(0, 64)
    assert speedup(150_000, 64) > 1.1 * plain
    assert speedup(0, 8 * 2048) > 1.1 * plain
    limit = PrefixConfig(mode="auto", min_speedup=1.05 * plain)
    for vocab_size, share in ((0, False), (150_000, True)):
        assert decided(limit, forest, cost(vocab_size, 64), [0, 0]).share == share


# The prefilter ------------------------------------------------------------------------------------


def test_steps_without_sharing_are_found_in_mode_auto_only() -> None:
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


def test_what_may_be_shared_is_weighed_against_all_positions() -> None:
    """Two of twenty rollouts are equal: 1.05 times as fast at best."""
    rollouts, _ = flat_rollouts(40, 10, 1, 20)
    for number, rollout in enumerate(rollouts[1:]):
        rollout.inputs[0] = number
    rollouts[1] = rollouts[0]
    assert without_sharing(PrefixConfig(mode="auto", min_speedup=1.06), rollouts, 1)
    assert not without_sharing(PrefixConfig(mode="auto", min_speedup=1.05), rollouts, 1)


def test_tails_without_loss_count_in_a_step_without_sharing() -> None:
    """Of 49 positions 42 are needed, which take (42 / 49)^2 of the time at least."""
    rollouts, _ = flat_rollouts(40, 10, 1, 20)
    for number, rollout in enumerate(rollouts):
        rollout.inputs[0] = number
        rollout.trained[-7:] = False
    auto = PrefixConfig(mode="auto", min_speedup=1.35)
    assert without_sharing(auto, rollouts, 1)
    needed = [rollout.up_to_loss() for rollout in rollouts]
    assert not without_sharing(auto, needed, 1)
    assert without_sharing(PrefixConfig(mode="auto", min_speedup=1.37), needed, 1)


def test_unread_outputs_count_in_a_step_without_sharing() -> None:
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
