"""Layers in FP8: what positions they take, what that costs, and what is padded for them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.layers import precision
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.joint_forest import joint_forest
from megatron_prefix.plan.planner import best_plan
from megatron_prefix.run.execute.inputs import SegmentInputs
from megatron_prefix.run.read.heads import MOVES_LABELS
from megatron_prefix.tree import Forest, Pairs, TreeOptions, build
from tests.harness.trees import is_prefix_tree, rollout_sets, tree_options

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
    assert precision.rows(config, sequence_ranks) == rows
    assert precision.whole(config, sequence_ranks, cp) == whole


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
    options = replace(options, whole=times * options.multiple)
    plain, forest = (build(rollouts, groups, one) for one in (replace(options, whole=1), options))
    is_prefix_tree(forest)
    assert [s[1:5] for s in forest.segments] == [s[1:5] for s in plain.segments]
    for found, before in zip(forest.segments, plain.segments, strict=True):
        assert not found.padded_length % options.whole
        assert 0 <= found.padded_length - before.padded_length < options.whole
        num = len(before.spans) - (not before.inner)
        assert found.spans[:num] == before.spans[:num]
        rest = found.spans[num:]
        if before.inner:
            assert all(not span.rollouts and not span.length for span in rest) and len(rest) < 2
        else:
            assert [span._replace(padded=0) for span in rest] == [
                before.spans[-1]._replace(padded=0)
            ]
    assert Forest.from_ints(forest.to_ints()) == forest
    best_plan(forest, 2, microbatches=tuple(range(len(rollouts))))


def _rollouts(*lengths: int) -> list[Pairs]:
    return [Pairs(np.arange(n), np.arange(n) + 1, np.arange(n) == n - 1) for n in lengths]


def test_fillers_are_whole() -> None:
    options = PrefixConfig(min_gain=0).tree_options(2, 12)
    forests = [build(_rollouts(*some), None, options) for some in ((30, 40), (20,))]
    joint = joint_forest(forests, [[0, 1], [0]], 1)
    assert joint.forest.whole == joint.union.whole == 12
    assert all(not segment.padded_length % 12 for segment in joint.forest.segments)


def test_the_rows_that_are_read_are_whole() -> None:
    options = replace(TreeOptions(min_gain=0), whole=16)
    (rollout,) = _rollouts(50)
    inputs = SegmentInputs(
        build([rollout], None, options), [rollout], torch.device("cpu"), multiple=16
    )
    (rows,) = inputs.rows
    assert rows is not None and len(rows.here) == 16 and 49 in rows.here
    assert len(inputs.read(0, {})) == 16  # type: ignore[arg-type]
    again = inputs.read(0, {MOVES_LABELS: True})
    assert again is not None and len(again) == 32 and set(again[16:].tolist()) == {int(again[15])}
