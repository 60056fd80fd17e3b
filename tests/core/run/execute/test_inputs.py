"""What segments are computed from."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given

from megatron_prefix.run.execute.inputs import SegmentInputs
from megatron_prefix.tree import Pairs, TreeOptions, build
from tests.harness.trees import rollout_sets, tree_options

CPU = torch.device("cpu")


@given(sets=rollout_sets(), options=tree_options())
def test_every_segment_reads_its_rollouts(
    sets: tuple[list[Pairs], list[int]], options: TreeOptions
) -> None:
    """The rows on a rollout's path are the rollout, at its own positions."""
    rollouts, groups = sets
    forest = build(rollouts, groups, options)
    inputs = SegmentInputs(forest, rollouts, CPU)
    for rollout, path in zip(rollouts, forest.paths, strict=True):
        parts = []
        for index, position in path:
            rows = forest.segments[index].spans
            start = sum(span.padded for span in rows[:position])
            parts.append(inputs[index][:, start : start + rows[position].length])
        tokens, labels, positions = torch.cat(parts, 1).tolist()
        assert tokens == rollout.inputs.tolist()
        assert labels == rollout.labels.tolist()
        assert positions == list(range(len(rollout)))
    for index, segment in enumerate(forest.segments):
        assert inputs[index].shape == (3, segment.padded_length)
        assert inputs[index].dtype == torch.int64
    highest = [span.start + span.padded for segment in forest.segments for span in segment.spans]
    assert inputs.max_position == max(highest) - 1


def test_padding_has_legal_tokens_and_goes_on_counting() -> None:
    rollouts = [Pairs(np.array([5, 6, 7]), np.array([6, 7, 8]), np.ones(3, bool))] * 2
    rollouts[1] = Pairs(np.array([5]), np.array([9]), np.ones(1, bool))
    forest = build(rollouts, None, TreeOptions(multiple=4, min_gain=0))
    inputs = SegmentInputs(forest, rollouts, CPU)
    assert inputs[0].tolist() == [
        [5, 6, 7, 0, 5, 0, 0, 0],
        [6, 7, 8, 0, 9, 0, 0, 0],
        [0, 1, 2, 3, 0, 1, 2, 3],
    ]


def test_a_stage_without_data_knows_positions() -> None:
    rollouts = [Pairs(np.arange(3), np.arange(3), np.ones(3, bool))]
    found = SegmentInputs(build(rollouts), None, CPU)
    assert found[0].tolist() == [[0] * 3, [0] * 3, [0, 1, 2]]


def test_the_model_is_called_as_the_trainer_calls_it() -> None:
    rollouts = [Pairs(np.array([5, 6]), np.array([6, 7]), np.ones(2, bool))]
    inputs = SegmentInputs(build(rollouts), rollouts, CPU)
    others = {"runtime_gather_output": True}
    for has_labels in (True, False):
        found = inputs.call(dict, 0, has_labels, others)
        assert found.pop("input_ids").tolist() == [[5, 6]]
        assert found.pop("position_ids").tolist() == [[0, 1]]
        labels = found.pop("labels")
        assert labels is None or labels.tolist() == [[6, 7]]
        assert (labels is None) != has_labels
        assert found == {"attention_mask": None, **others}
