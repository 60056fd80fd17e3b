"""Between a trainer's microbatches and segments: reading, cutting, laying out, joining."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from megatron_prefix.run.batch import SegmentInputs, TensorBatchAdapter, join
from torch import Tensor

from megatron_prefix.errors import UserError
from megatron_prefix.tree import Pairs, TreeOptions, build
from tests.harness.trees import rollout_sets, tree_options

CPU = torch.device("cpu")


def microbatch(samples: int = 2, length: int = 5) -> dict[str, Any]:
    tokens = torch.arange(samples * (length + 1)).view(samples, -1)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": torch.arange(length).expand(samples, -1) >= 3,
        "hidden": torch.randn(samples, length, 7),
        "advantage": torch.randn(samples),
        "table": torch.randn(3, length + 1),
        "uids": ["a", "b"],
        "group": "g",
    }


# --- TensorBatchAdapter ---------------------------------------------------------------------------


def test_pairs_of_every_sample() -> None:
    item = microbatch()
    item["loss_mask"] = torch.tensor([[0, 0.5, 0, 2, 0], [0, 0, 0, 0, 0]])
    found = TensorBatchAdapter().pairs(item)
    assert len(found) == 2
    for number, pairs in enumerate(found):
        assert pairs.inputs.tolist() == item["tokens"][number].tolist()
        assert pairs.labels.tolist() == item["labels"][number].tolist()
    assert found[0].trained.tolist() == [False, True, False, True, False]
    assert found[0].first_trained == 1
    assert not found[1].trained.any() and found[1].first_trained == 4


@pytest.mark.parametrize("name", ["tokens", "labels", "loss_mask"])
def test_a_microbatch_of_another_form_is_refused(name: str) -> None:
    item = microbatch()
    del item[name]
    with pytest.raises(UserError, match=f"has no {name}: pass an adapter that knows its form"):
        TensorBatchAdapter().pairs(item)


def test_the_group_of_a_microbatch() -> None:
    assert TensorBatchAdapter().group(microbatch()) == "g"
    assert TensorBatchAdapter().group({}) is None


def test_cutting_takes_the_first_positions_and_nothing_else() -> None:
    item = microbatch()
    found = TensorBatchAdapter().cut(item, 2)
    assert found.keys() == item.keys()
    for name in ("tokens", "labels", "loss_mask", "hidden"):
        assert torch.equal(found[name], item[name][:, 2:])
    for name in ("advantage", "table", "uids", "group"):
        assert found[name] is item[name]
    assert item["tokens"].shape == (2, 5)


def test_cutting_nothing_keeps_the_values() -> None:
    item = microbatch()
    found = TensorBatchAdapter().cut(item, 0)
    assert all(torch.equal(v, item[n]) for n, v in found.items() if isinstance(v, Tensor))


@pytest.mark.parametrize("output", ["loss", "logits"])
def test_the_model_is_called_as_the_trainer_calls_it(output: str) -> None:
    calls = []

    def model(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return "output"

    tensors = [torch.tensor([[n, n + 1]]) for n in (1, 5, 7)]
    assert TensorBatchAdapter(output).call(model, *tensors) == "output"
    tokens, positions, labels = tensors
    expected = labels if output == "loss" else None
    assert calls == [((tokens, positions, None), {"labels": expected})]


def test_an_output_that_does_not_exist() -> None:
    with pytest.raises(UserError, match="output is 'hidden': give 'loss' or 'logits'"):
        TensorBatchAdapter("hidden")


# --- SegmentInputs --------------------------------------------------------------------------------


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
    forest = build(rollouts, None, TreeOptions(align=4, min_gain=0))
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


# --- join -----------------------------------------------------------------------------------------


def test_joining_puts_pieces_in_order() -> None:
    pieces = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])]
    assert join([pieces], 3).tolist() == [[1, 2, 3]]


def test_samples_that_begin_later_are_filled_with_zeros_in_front() -> None:
    """Poisoned memory would show: the front is never read, but it goes into the trainer's loss."""
    first = [torch.ones(1, 2, 4), torch.full((1, 3, 4), 2.0)]
    found = join([first, [torch.full((1, 1, 4), 3.0)]], 5)
    assert found.shape == (2, 5, 4)
    assert found[0, :, 0].tolist() == [1, 1, 2, 2, 2]
    assert found[1, :, 3].tolist() == [0, 0, 0, 0, 3]


def test_a_single_whole_piece_is_not_copied() -> None:
    piece = torch.randn(1, 5)
    assert join([[piece]], 5) is piece
    assert join([[piece]], 6).shape == (1, 6)


def test_gradients_reach_every_piece() -> None:
    pieces = [torch.randn(1, n, requires_grad=True) for n in (2, 3, 1)]
    weight = torch.randn(2, 6)
    (join([pieces[:2], pieces[2:]], 6) * weight).sum().backward()
    assert torch.equal(pieces[0].grad, weight[:1, 1:3])  # type: ignore[arg-type]
    assert torch.equal(pieces[1].grad, weight[:1, 3:])  # type: ignore[arg-type]
    assert torch.equal(pieces[2].grad, weight[1:, 5:])  # type: ignore[arg-type]


def test_what_reaches_the_front_of_a_sample_reaches_no_piece() -> None:
    piece = torch.randn(1, 2, requires_grad=True)
    (join([[piece], [piece]], 4) * torch.tensor([1.0, 1.0, 0.0, 0.0])).sum().backward()
    assert piece.grad is not None and (piece.grad == 0).all()
