"""Layers in FP8: what positions they take, what that costs, and what is padded for them."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_prefix.lab.predict.precision import kept_bytes
from megatron_prefix.layers import precision
from megatron_prefix.plan.planner import best_plan
from megatron_prefix.tree import build
from tests.harness.trees import is_prefix_tree, received, rollout_sets, tree_options

NONE = {"fp8": None, "fp8_recipe": "blockwise"}


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
def test_rows(fields, sequence_ranks, cp, rows, whole):
    config = SimpleNamespace(**fields)
    assert precision.row_multiple(config, sequence_ranks) == rows
    assert precision.segment_multiple(config, sequence_ranks, cp) == whole


def column_blocks(rows, columns):
    """Bytes of a copy in blocks of columns, as transformer-engine 2.11 allocates it: `make_empty`
    and `get_scale_shape` in transformer_engine/pytorch/tensor/float8_blockwise_tensor.py."""
    return rows * columns + 4 * math.ceil(rows / 128) * math.ceil(columns / 4) * 4


def mx_column_blocks(rows, columns):
    """The same in transformer_engine/pytorch/tensor/mxfp8_tensor.py; a scale is a byte."""
    scales = math.ceil(rows / 32 / 4) * 4, math.ceil(columns / 128) * 128
    return rows * columns + math.prod(scales)


@pytest.mark.parametrize(
    ("recipe", "allocated"), [("blockwise", column_blocks), ("mxfp8", mx_column_blocks)]
)
def test_what_a_product_keeps_of_its_input(recipe, allocated):
    config = SimpleNamespace(fp8="e4m3", fp8_recipe=recipe)
    assert kept_bytes(config, 2) == allocated(2048, 14336) / (2048 * 14336)
    assert kept_bytes(SimpleNamespace(**{**vars(config), "fp8": None}), 2) == 2
    assert kept_bytes(SimpleNamespace(fp8="e4m3", fp8_recipe="delayed"), 2) == 2


@given(rollout_sets(), tree_options(), st.sampled_from([1, 2, 5]))
def test_segments_are_whole(sets, options, times):
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
