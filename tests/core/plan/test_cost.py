"""The cost model against counts made position by position."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings

from megatron_prefix.lab.models.config import transformer_config
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.cost import CostModel, Work, segment_work, stock_work
from megatron_prefix.tree import Forest, Pairs, build
from tests.harness.fuzzing import rounds
from tests.harness.trees import flat_forest, rollout_sets, tree_options

COST = CostModel.of_flops(linear=1000.0, head=70.0, attention=3.0, action_tokens=2.0)


def counted(forest: Forest, rollouts: Sequence[Pairs]) -> tuple[float, float]:
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
def test_flops_are_those_of_every_position(sets, options) -> None:
    forest = build(*sets, options)
    stock, prefix = counted(forest, sets[0])
    assert COST.stock(forest) == pytest.approx(stock)
    assert COST.prefix(forest) == pytest.approx(prefix)
    assert COST.speedup(forest) == pytest.approx(stock / prefix)
    assert sum(map(COST.segment, forest.segments)) == COST.prefix(forest)


def test_the_stock_schedule_runs_the_trainers_microbatches() -> None:
    """Positions and pairs are those of the samples, overheads those of microbatches."""
    forest = flat_forest(prefix=4, suffix=2, num=3)
    assert forest.num_positions == (6, 6, 6)
    alone, packed = stock_work(forest), stock_work(forest, [0, 5, 5])
    assert alone == Work(18, 18, 3 * 21, 3, 3)
    assert packed == alone._replace(actions=2, calls=2)
    assert COST.stock(forest) - COST.stock(forest, [0, 5, 5]) == 2000
    assert COST.speedup(forest, [0, 0, 0]) < COST.speedup(forest)


def test_work_of_segments() -> None:
    prompt, *waves = flat_forest(prefix=4, suffix=2, num=2).segments
    assert segment_work(prompt) == Work(4, 0, 10, 1, 1)
    assert {segment_work(wave) for wave in waves} == {Work(2, 2, 11, 1, 2, 4)}


@given(rollout_sets(), tree_options())
@settings(max_examples=rounds(30, 500))
def test_what_several_spans_see_counts_once(sets, options) -> None:
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


def test_nothing_is_as_fast_as_nothing() -> None:
    assert COST.speedup(build([])) == 1.0


def test_flops_of_a_shape_are_those_of_its_matrices() -> None:
    """Two FLOPs a weight and position; the matrices written out one by one."""
    hidden, ffn, layers, vocab = 8, 20, 3, 50
    matrices = [(hidden, 4 * 2), (hidden, 2 * 2), (hidden, 2 * 2), (4 * 2, hidden)]  # q k v o
    shape = dict(
        num_layers=layers, hidden_size=hidden, num_attention_heads=4, num_query_groups=2,
        kv_channels=2, ffn_hidden_size=ffn,
    )  # fmt: skip
    for gated, mlp in ((True, 3), (False, 2)):
        cost = cost_of(SimpleNamespace(**shape, gated_linear_unit=gated), vocab)
        weights = sum(a * b for a, b in [*matrices, *[(hidden, ffn)] * mlp])
        assert cost.forward.positions == 2 * layers * weights
        assert cost.forward.scored == 2 * hidden * vocab
        assert cost.forward.pairs == layers * 4 * (2 * 2 + 2 * 2)  # q @ k and p @ v, per head


def test_a_megatron_config_counts_like_its_spec() -> None:
    config = SimpleNamespace(
        num_layers=3, hidden_size=8, num_attention_heads=4, num_query_groups=None, kv_channels=2,
        ffn_hidden_size=20, gated_linear_unit=False,
    )  # fmt: skip
    spec = resolve("tiny-llama", **{**vars(config), "num_query_groups": 4})
    for vocab, known in ((0, None), (50, 50)):
        assert cost_of(config, known) == cost_of(spec, vocab)


@pytest.mark.parametrize(
    ("frequency", "num_sparse"), [(1, 4), (2, 2), (3, 2), ([0, 1, 1, 1], 3), ([1, 0, 0, 0], 1)]
)
def test_experts_of_a_megatron_config(frequency, num_sparse) -> None:
    """Layers with experts have the visited and the shared ones, the others their own MLP."""
    config = SimpleNamespace(
        num_layers=4, hidden_size=8, num_attention_heads=4, num_query_groups=2, kv_channels=2,
        ffn_hidden_size=20, gated_linear_unit=True, num_moe_experts=16, moe_router_topk=2,
        moe_ffn_hidden_size=6, moe_shared_expert_intermediate_size=10, moe_layer_freq=frequency,
    )  # fmt: skip
    attention = 8 * 2 * (2 * 4 + 2 * 2)
    mlps = num_sparse * (2 * 6 + 10) + (4 - num_sparse) * 20
    wanted = 2 * (4 * attention + 3 * 8 * mlps)
    assert cost_of(config).forward.positions == pytest.approx(wanted)
    config.moe_shared_expert_intermediate_size = None
    wanted -= 2 * 3 * 8 * num_sparse * 10
    assert cost_of(config).forward.positions == pytest.approx(wanted)


def test_a_config_counts_as_megatron_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_only_attention_layers_have_pairs() -> None:
    """Qwen3-Next has 12 of them, 16 heads of 256; a pair costs 4 FLOPs a channel."""
    cost = cost_of(resolve("qwen3-next-80b-a3b"))
    assert cost.forward.pairs == 12 * 4 * 16 * 256
    spec = resolve("tiny-nemotron-h")
    mixers = sum(kind.parameters(spec) for (kind,) in spec.layers if kind.form)
    mixers -= 3 * 4 * (128 + 2 * 16)  # convolutions
    scans = 3 * (2 * 8 * 16 * 8 + 64 * (2 * 8 + 128))  # a state written and read; chunks of 64
    assert cost_of(spec).forward.positions == 2 * (mixers + scans + 2 * 2 * 64 * 128)


def test_parameters_of_llama3_8b() -> None:
    """The model's matrices, its input embedding aside, twice: 7.5 G weights."""
    cost = cost_of(resolve("llama3-8b"))
    assert (cost.forward.positions + cost.forward.scored) / 2 == pytest.approx(7.5e9, rel=0.01)


def test_experts_count_where_a_token_goes() -> None:
    """Qwen3-30B-A3B computes with 3.3 G of its weights, of which 0.3 G are the input embedding."""
    cost = cost_of(resolve("qwen3-30b-a3b"))
    assert (cost.forward.positions + cost.forward.scored) / 2 == pytest.approx(3.0e9, rel=0.03)
