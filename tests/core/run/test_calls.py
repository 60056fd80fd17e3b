"""What a model call says of a microbatch, and what cannot be answered from segments."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_prefix.errors import CannotShare, UserError
from megatron_prefix.run.calls import (
    Callbacks,
    CallLayout,
    ModelCall,
    are_contiguous,
    bound,
    check,
    layouts,
)
from megatron_prefix.run.read.read_calls import CallTokens, check_positions, read_tokens
from megatron_prefix.tree.cp_layout import Slices
from tests.harness import ranks  # noqa: F401  # applies the CPU platform


def forward(
    input_ids: Any, position_ids: Any, attention_mask: Any, labels: Any = None, **options: Any
) -> None:
    """The arguments of a model."""


def call(*args: Any, number: int = 0, **kwargs: Any) -> ModelCall:
    return bound(inspect.signature(forward), args, kwargs, number)


def packing(*ends: int, padded: tuple[int, ...] | None = None, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(
        qkv_format="thd",
        cu_seqlens_q=torch.tensor(ends, dtype=torch.int32),
        cu_seqlens_q_padded=None if padded is None else torch.tensor(padded, dtype=torch.int32),
        **fields,
    )


def test_arguments_are_found_by_name_wherever_they_stand() -> None:
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    found = call(tokens, None, None, loss_mask=tokens, runtime_gather_output=True)
    assert found["input_ids"] is tokens and found["loss_mask"] is tokens
    assert found["labels"] is None and found["decoder_input"] is None
    assert found.others == {"runtime_gather_output": True}


@pytest.mark.parametrize(
    ("given", "cp_size", "wanted"),
    [
        (dict(tokens=(3, 5)), 1, CallLayout((5, 5, 5), False)),
        (dict(tokens=(1, 9), ends=(0, 4, 9)), 1, CallLayout((4, 5), True)),
        (dict(tokens=(1, 12), ends=(0, 3, 7), padded=(0, 4, 12)), 1, CallLayout((4, 8), True)),
        (dict(tokens=(1, 12), ends=(0, 4, 9)), 1, CallLayout((4, 5, 3), True, 3)),
        (dict(tokens=(1, 6), ends=(0, 4, 12)), 2, CallLayout((4, 8), True)),
        (dict(tokens=(1, 4), ends=(0, 4, 4, 4)), 1, CallLayout((4,), True)),
        (dict(ends=(0, 4, 9)), 1, CallLayout((4, 5), True)),
        (dict(tokens=(2, 4), ends=(0, 4, 8)), 1, CallLayout((4, 4), False)),
        (dict(), 1, None),
    ],
)
def test_layouts(given: dict[str, Any], cp_size: int, wanted: CallLayout | None) -> None:
    shape, ends = given.get("tokens"), given.get("ends")
    found = call(
        None if shape is None else torch.zeros(shape, dtype=torch.int64), None, None,
        packed_seq_params=None if ends is None else packing(*ends, padded=given.get("padded")),
    )  # fmt: skip
    assert layouts([found], cp_size) == (None if wanted is None else [wanted])


def test_labels_alone_say_the_shape() -> None:
    assert layouts([call(None, None, None, torch.zeros(2, 4))], 1) == [CallLayout((4, 4), False)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"decoder_input": torch.zeros(4, 1, 8)},
            "model calls of the step have decoder_input",
        ),
        ({"inference_context": object()}, "inference_context: leave it out"),
        ({"inference_params": object()}, "inference_params"),
        ({"output_processor_context": {"x": torch.zeros(3)}}, "which has tensors"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(
    arguments: dict[str, Any], message: str
) -> None:
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    check([call(tokens, None, None)])
    with pytest.raises(CannotShare, match=message):
        check([call(tokens, None, None), call(tokens, None, attention_mask=None, **arguments)])


def test_calls_of_one_step_are_alike() -> None:
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    plain = call(tokens, None, None)
    with pytest.raises(CannotShare, match="some model calls of the step have labels"):
        check([plain, call(tokens, None, None, tokens)])
    with pytest.raises(CannotShare, match="some model calls of the step have loss_mask"):
        check([plain, call(tokens, None, None, loss_mask=tokens)])
    with pytest.raises(CannotShare, match="differ in temperature"):
        check([call(tokens, None, None, temperature=t) for t in (0.7, 1.0)])


def test_other_packings_are_refused() -> None:
    odd = SimpleNamespace(qkv_format="sbhd", cu_seqlens_q=torch.tensor([0, 4]))
    with pytest.raises(CannotShare, match="qkv_format 'sbhd': give 'thd'"):
        layouts([call(torch.zeros(1, 4), None, None, packed_seq_params=odd)], 1)
    with pytest.raises(CannotShare, match="has no position"):
        layouts([call(torch.zeros(1, 0), None, None)], 1)


def columns_of(calls: list[ModelCall], trained: Any = None) -> CallTokens:
    found = read_tokens(calls, 1, Callbacks(trained))
    assert found is not None
    return found


def test_columns_of_all_calls_one_behind_the_other() -> None:
    calls = [
        call(torch.tensor([[1, 2], [3, 4]]), None, None, torch.tensor([[2, 3], [4, 5]])),
        call(torch.tensor([[5, 6, 7]]), None, None, torch.tensor([[6, 7, 8]])),
    ]
    found = columns_of(calls)
    assert found.layouts == [CallLayout((2, 2), False), CallLayout((3,), False)]
    assert found.tokens is not None and found.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert found.labels is not None and found.labels.tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert found.trained is None and found.positions is None


def test_the_loss_mask_comes_before_the_callback() -> None:
    tokens, mask = torch.tensor([[1, 2, 3]]), torch.tensor([[0.0, 0.5, -1.0]])
    asked: list[ModelCall] = []

    def trained(one: ModelCall) -> Tensor:
        asked.append(one)
        return torch.tensor([[True, False, False]])

    with_mask = columns_of([call(tokens, None, None, loss_mask=mask)], trained)
    assert with_mask.trained is not None and with_mask.trained.tolist() == [0, 1, 1] and not asked
    without = columns_of([call(tokens, None, None)], trained)
    assert without.trained is not None and without.trained.tolist() == [1, 0, 0] and len(asked) == 1


@pytest.mark.parametrize("name", ["input_ids", "position_ids", "labels", "loss_mask"])
def test_tensors_overwritten_after_the_call_are_an_error(name: str) -> None:
    """A static buffer holds the last microbatch when all forward steps have run."""
    given = {n: torch.tensor([[1, 2, 3]]) for n in ("input_ids", "position_ids", "labels")}
    given["loss_mask"] = torch.ones(1, 3)
    made = call(attention_mask=None, **given)
    columns_of([made])
    given[name].zero_()
    with pytest.raises(UserError, match="of microbatch 0 is overwritten"):
        columns_of([made])


def test_columns_of_another_size_are_refused() -> None:
    tokens = torch.tensor([[1, 2, 3]])
    with pytest.raises(CannotShare, match="labels of a model call has 2 of 3 positions"):
        columns_of([call(tokens, None, None, tokens[:, :2])])
    with pytest.raises(CannotShare, match="trained positions of a model call has 1 of 3"):
        columns_of([call(tokens, None, None)], lambda one: torch.ones(1))


def test_without_gradients_only_the_callback_omits_positions() -> None:
    tokens, mask = torch.tensor([[1, 2, 3]]), torch.tensor([[0, 0, 1]])
    calls = [call(tokens, None, None, loss_mask=mask)]
    free = read_tokens(calls, 1, Callbacks(), forward_only=True)
    told = read_tokens(calls, 1, Callbacks(lambda one: one["loss_mask"]), forward_only=True)
    assert free is not None and free.trained is None
    assert told is not None and told.trained is not None and told.trained.tolist() == [0, 0, 1]


def test_a_mask_over_tokens_is_no_mask_of_positions() -> None:
    tokens, mask = torch.tensor([[1, 2, 3]]), torch.tensor([[0, 0, 1]])
    calls = [call(tokens, None, None, loss_mask=mask)]
    free = read_tokens(calls, 1, Callbacks(masks_tokens=True))
    told = read_tokens(calls, 1, Callbacks(lambda one: mask.roll(-1), masks_tokens=True))
    assert free is not None and free.trained is None
    assert told is not None and told.trained is not None and told.trained.tolist() == [0, 1, 0]


def known(positions: list[int], *lengths: int) -> CallTokens:
    column = np.array(positions)
    return CallTokens([CallLayout(lengths, True)], column, None, None, column)


def test_a_packing_or_the_trainer_says_how_calls_are_cut() -> None:
    for given, is_contiguous in (("zigzag", False), ("contiguous", True)):
        packed = packing(0, 4, 12, cp_partition_mode=given)
        calls = [call(torch.zeros(1, 6), None, None, packed_seq_params=packed)]
        assert are_contiguous(calls, Slices.ZIGZAG) is is_contiguous
        assert are_contiguous(calls, Slices.CONTIGUOUS)
    (found,) = layouts(calls, 2) or []
    assert found.held(0, 2).tolist() == [0, 3, 4, 5, 10, 11]


def test_contiguous_slices_of_context_parallelism_are_refused() -> None:
    check_positions(known([0, 1, 6, 7], 8), 0, 2, used=False)
    for rank, positions in ((0, [0, 1, 2, 3]), (1, [4, 5, 6, 7])):
        with pytest.raises(CannotShare, match="contiguous parts"):
            check_positions(known(positions, 8), rank, 2, used=False)
        with pytest.raises(CannotShare, match="contiguous parts"):  # behind it padding
            check_positions(known([*positions, 0, 0], 8, 4), rank, 2, used=False)
    with pytest.raises(CannotShare, match="contiguous parts"):  # a pack cut as a whole
        check_positions(known([2, 3, 4, 5, 6, 7], 4, 8), 1, 2, used=False)


def test_learned_embeddings_need_positions_that_start_at_zero() -> None:
    check_positions(known([0, 1, 2, 0, 1], 3, 2), 0, 1, used=True)
    check_positions(known([7, 8, 9], 3), 0, 1, used=False)
    with pytest.raises(CannotShare, match="do not count from 0"):
        check_positions(known([0, 1, 2, 3, 4], 3, 2), 0, 1, used=True)
