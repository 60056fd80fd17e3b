"""The cost model against counts made position by position, and the gate."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings

from megatron_prefix.cli.plan import cost_model
from megatron_prefix.config import PrefixConfig
from megatron_prefix.models.presets import resolve
from megatron_prefix.plan.cost import CostModel, decide
from megatron_prefix.tree import Forest, TreeOptions, build
from tests.harness.trees import flat_rollouts, rollout_sets, tree_options

COST = CostModel(linear=1000.0, head=70.0, attention=3.0, action_tokens=2.0)


def counted(forest: Forest) -> tuple[float, float]:
    """Both schedules' forward FLOPs, one position after the other."""
    stock = sum(
        2000 + sum(1070 + 3 * (position + 1) for position in range(n)) for n in forest.num_positions
    )
    prefix = 0.0
    for segment in forest.segments:
        prefix += 2000
        for span in segment.spans:
            for position in range(span.start, span.start + span.padded):
                prefix += 1000 + 70 * segment.scored + 3 * (position + 1)
    return stock, prefix


@given(rollout_sets(), tree_options())
@settings(max_examples=60)
def test_flops_are_those_of_every_position(sets, options) -> None:
    forest = build(*sets, options)
    stock, prefix = counted(forest)
    assert COST.stock(forest) == pytest.approx(stock)
    assert COST.prefix(forest) == pytest.approx(prefix)
    assert COST.speedup(forest) == pytest.approx(stock / prefix)
    assert sum(map(COST.segment, forest.segments)) == COST.prefix(forest)


def test_nothing_is_as_fast_as_nothing() -> None:
    assert COST.speedup(build([])) == 1.0


def test_flops_of_a_shape_are_those_of_its_matrices() -> None:
    """Two FLOPs a weight and position; the matrices written out one by one."""
    hidden, ffn, layers, vocab = 8, 20, 3, 50
    matrices = [(hidden, 4 * 2), (hidden, 2 * 2), (hidden, 2 * 2), (4 * 2, hidden)]  # q k v o
    shape = dict(
        num_layers=layers, hidden_size=hidden, num_heads=4, num_kv_heads=2, head_dim=2,
        ffn_hidden_size=ffn, vocab_size=vocab,
    )  # fmt: skip
    for gated, mlp in ((True, 3), (False, 2)):
        cost = CostModel.of_shape(**shape, gated=gated)
        weights = sum(a * b for a, b in [*matrices, *[(hidden, ffn)] * mlp])
        assert cost.linear == 2 * layers * weights
        assert cost.head == 2 * hidden * vocab
        assert cost.attention == layers * 4 * (2 * 2 + 2 * 2)  # q @ k and p @ v, per head


def test_a_megatron_config_counts_like_its_shape() -> None:
    config = SimpleNamespace(
        num_layers=3, hidden_size=8, num_attention_heads=4, num_query_groups=None, kv_channels=2,
        ffn_hidden_size=20, gated_linear_unit=False,
    )  # fmt: skip
    wanted = CostModel.of_shape(3, 8, 4, 4, 2, 20, 0, gated=False)
    assert CostModel.of_config(config) == wanted


def test_parameters_of_llama3_8b() -> None:
    """The model's matrices, its input embedding aside, twice: 7.5 G weights."""
    cost = cost_model(resolve("llama3-8b"))
    assert (cost.linear + cost.head) / 2 == pytest.approx(7.5e9, rel=0.01)


def test_experts_count_where_a_token_goes() -> None:
    """Qwen3-30B-A3B computes with 3.3 G of its weights, of which 0.3 G are the input embedding."""
    cost = cost_model(resolve("qwen3-30b-a3b"))
    assert (cost.linear + cost.head) / 2 == pytest.approx(3.0e9, rel=0.03)


# The gate -----------------------------------------------------------------------------------------


def forest_of(num: int) -> Forest:
    rollouts, groups = flat_rollouts(400, 100, num, 1)
    return build(rollouts, groups, TreeOptions())


@pytest.mark.parametrize(("mode", "share"), [("on", True), ("off", False), ("observe", False)])
def test_modes_that_do_not_ask(mode, share) -> None:
    decision = decide(PrefixConfig(mode=mode), forest_of(1), COST)
    assert (decision.share, decision.fallback, decision.reason) == (share, False, f"mode {mode}")
    assert decision.predicted_speedup == COST.speedup(forest_of(1))


def test_auto_shares_where_it_pays() -> None:
    speedup = COST.speedup(forest_of(8))
    assert speedup > 2
    config = PrefixConfig(mode="auto", min_speedup=speedup)
    assert decide(config, forest_of(8), COST).share
    decision = decide(PrefixConfig(mode="auto", min_speedup=speedup * 1.01), forest_of(8), COST)
    assert not decision.share
    assert decision.fallback
    assert "below min_speedup" in decision.reason


def test_auto_falls_back_for_rollouts_that_share_nothing() -> None:
    decision = decide(PrefixConfig(mode="auto"), forest_of(1), COST)
    assert decision.fallback
    assert decision.predicted_speedup == pytest.approx(1.0)
