"""Layers in FP8: what positions they take, what that costs, and what is padded for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.enums import Fp8Recipe

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.predict.execution import Execution
from megatron_prefix.lab.predict.kinds import memory_of
from megatron_prefix.lab.predict.precision import kept_bytes
from megatron_prefix.layers import precision
from megatron_prefix.layers.model import cost_of, layers_of
from megatron_prefix.plan.joint_forest import joint_forest
from megatron_prefix.plan.planner import best_plan
from megatron_prefix.run.execute.inputs import SegmentInputs
from megatron_prefix.run.read.heads import MOVES_LABELS
from megatron_prefix.tree import Pairs, TreeOptions, build
from tests.harness.trees import is_prefix_tree, received, rollout_sets, tree_options

NONE: dict[str, Any] = {"fp8": None, "fp8_recipe": "blockwise"}


@pytest.mark.parametrize(
    ("fields", "sequence_ranks", "cp", "rows", "whole"),
    [
        (NONE, 1, 1, 1, 1),
        (NONE, 2, 4, 2, 1),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, 1, 1, 16, 16),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, 1, 2, 16, 32),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, 2, 1, 256, 256),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 1, 1, 32, 32),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 4, 2, 128, 256),
        ({"fp8": "e4m3", "fp8_recipe": "delayed"}, 2, 1, 2, 1),  # it is refused later on
        ({}, 1, 1, 1, 1),
    ],
)
def test_rows(fields: Any, sequence_ranks: int, cp: int, rows: int, whole: int) -> None:
    config = SimpleNamespace(**fields)
    assert precision.row_multiple(config, sequence_ranks) == rows
    assert precision.segment_multiple(config, sequence_ranks, cp) == whole


@pytest.mark.parametrize(
    ("fields", "untried"),
    [
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, True),
        ({"fp8": "hybrid", "fp8_recipe": Fp8Recipe.mxfp8}, True),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, False),
        ({"fp8": None, "fp8_recipe": "mxfp8"}, False),
        ({}, False),
    ],
)
def test_what_has_run_on_no_gpu(fields: dict[str, Any], untried: bool) -> None:
    assert precision.is_untried(SimpleNamespace(**fields)) is untried


FP8: dict[str, Any] = {"fp8": "e4m3", "fp8_recipe": "blockwise"}


def column_blocks(rows: int, columns: int) -> int:
    """Bytes of a copy in blocks of columns, as transformer-engine 2.11 allocates it: `make_empty`
    and `get_scale_shape` in transformer_engine/pytorch/tensor/float8_blockwise_tensor.py."""
    return rows * columns + 4 * math.ceil(rows / 128) * math.ceil(columns / 4) * 4


def mx_column_blocks(rows: int, columns: int) -> int:
    """The same in transformer_engine/pytorch/tensor/mxfp8_tensor.py; a scale is a byte."""
    scales = math.ceil(rows / 32 / 4) * 4, math.ceil(columns / 128) * 128
    return rows * columns + math.prod(scales)


@pytest.mark.parametrize(
    ("recipe", "allocated"), [("blockwise", column_blocks), ("mxfp8", mx_column_blocks)]
)
def test_what_a_product_keeps_of_its_input(
    recipe: str, allocated: Callable[[int, int], int]
) -> None:
    config = SimpleNamespace(fp8="e4m3", fp8_recipe=recipe)
    assert kept_bytes(config, 2) == allocated(2048, 14336) / (2048 * 14336)
    assert kept_bytes(SimpleNamespace(**{**vars(config), "fp8": None}), 2) == 2
    assert kept_bytes(SimpleNamespace(fp8="e4m3", fp8_recipe="delayed"), 2) == 2


INPUTS: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, int]]]] = {
    "dense": ("llama3-8b", {}, {"attention": (4096, 0), "MLP": (4096, 14336)}),
    "experts": ("qwen3-30b-a3b", {}, {"attention": (2048, 0), "experts": (0, 8 * (2048 + 768))}),
    "latents": (
        "tiny-deepseek", {"hidden_size": 128, "q_lora_rank": 48, "kv_lora_rank": 32},
        {"multi-latent attention": (2 * 128, 48 + 32)},
    ),
    "GatedDeltaNet": ("tiny-qwen3-next", {}, {"GatedDeltaNet": (64, 32)}),
    "Mamba2": ("tiny-nemotron-h", {}, {"Mamba2": (64, 128)}),
}  # fmt: skip
"""Model, fields, and by kind of layer numbers of a position that its products keep of the norm's
output, and of what else they are given."""


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", list(INPUTS))
def test_inputs_of_products_are_kept_in_fp8(name: str, tp: int) -> None:
    """Everything else is kept as in 16 bit: inputs of norms and of activation functions, queries,
    keys, values and the output of attention, which its projection keeps as it is."""
    model, fields, kinds = INPUTS[name]
    plain = resolve(model, **fields)
    form, copy = Execution(tp=tp, sequence_parallel=tp > 1), column_blocks(2048, 512) / (2048 * 512)
    layers = {kind.name: kind for slots in layers_of(plain) for kind in slots}
    for layer in map(layers.__getitem__, kinds):
        given, inputs = kinds[layer.name]
        if layer.name == "experts":  # a rank's part of them gets tokens of all
            inputs += (tp - 1) * 8 * 2048
        wide, narrow = (memory_of(layer, one, form) for one in (plain, replace(plain, **FP8)))
        assert wide.inner - narrow.inner == pytest.approx(inputs / tp * (2 - copy))
        assert wide.wave - narrow.wave == pytest.approx(wide.inner - narrow.inner)
        copies = given * copy if given else None  # as it is: routers read it, too
        assert narrow.norm_output == (copies if copies is None else pytest.approx(copies / tp))
        assert narrow.temporary == wide.temporary and narrow.payload == wide.payload


def test_products_of_layers_cost_less() -> None:
    spec = resolve("llama3-8b")
    plain, fast = cost_of(spec), cost_of(replace(spec, fp8="e4m3", fp8_recipe="blockwise"))
    assert fast.forward.positions == pytest.approx(plain.forward.positions / precision.RATE)
    assert precision.RATE > 1
    assert fast.forward.pairs == plain.forward.pairs
    assert fast.forward.scored == plain.forward.scored


@given(rollout_sets(), tree_options(), st.sampled_from([1, 2, 5]))
def test_segments_are_whole(
    sets: tuple[list[Pairs], list[int]], options: TreeOptions, times: int
) -> None:
    """Only padding is added, and none between spans of inner segments; plans run."""
    rollouts, groups = sets
    options = replace(options, pad_multiple=times * options.multiple)
    plain, forest = (
        build(rollouts, groups, one) for one in (replace(options, pad_multiple=1), options)
    )
    is_prefix_tree(forest)
    assert [s[1:5] for s in forest.segments] == [s[1:5] for s in plain.segments]
    for found, before in zip(forest.segments, plain.segments, strict=True):
        assert not found.padded_length % options.pad_multiple
        assert 0 <= found.padded_length - before.padded_length < options.pad_multiple
        num = len(before.spans) - (not before.inner)
        assert found.spans[:num] == before.spans[:num]
        rest = found.spans[num:]
        if before.inner:
            assert all(not span.rollouts and not span.length for span in rest) and len(rest) < 2
        else:
            assert [span._replace(padded=0) for span in rest] == [
                before.spans[-1]._replace(padded=0)
            ]
    assert received(forest) == forest
    best_plan(forest, 2, microbatches=tuple(range(len(rollouts))))


def _rollouts(*lengths: int) -> list[Pairs]:
    return [Pairs(np.arange(n), np.arange(n) + 1, np.arange(n) == n - 1) for n in lengths]


def test_fillers_are_whole() -> None:
    options = PrefixConfig(min_gain=0).tree_options(2, 12)
    forests = [build(_rollouts(*some), None, options) for some in ((30, 40), (20,))]
    joint = joint_forest(forests, [[0, 1], [0]], 1)
    assert joint.forest.pad_multiple == joint.union.pad_multiple == 12
    assert all(not segment.padded_length % 12 for segment in joint.forest.segments)


def test_the_rows_that_are_read_are_whole() -> None:
    options = replace(TreeOptions(min_gain=0), pad_multiple=16)
    (rollout,) = _rollouts(50)
    inputs = SegmentInputs(
        build([rollout], None, options), [rollout], torch.device("cpu"), multiple=16
    )
    (rows,) = inputs.rows
    assert rows is not None and len(rows.positions) == 16 and 49 in rows.positions
    assert len(inputs.read(0, {})) == 16  # type: ignore[arg-type]
    again = inputs.read(0, {MOVES_LABELS: True})
    assert again is not None and len(again) == 32 and set(again[16:].tolist()) == {int(again[15])}
