"""Masks of microbatches whose model calls have none: heeded where they fit, else all positions."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.run.calls import Callbacks, CallLayout, ModelCall
from megatron_prefix.run.read.read_calls import trained_positions
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.trainers.table import NEMO_RL
from tests.harness import steps
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import Contract

IDS = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 1, 0, 0]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0]])
LENGTHS = torch.tensor([6, 4])
FLAGS = [[0, 0, 1, 1, 1, 1], [0, 1, 1, 1]]


def nemo(**changes: Any) -> SimpleNamespace:
    data = {"input_ids": IDS, "token_mask": MASK, "input_lengths": LENGTHS, **changes}
    return SimpleNamespace(data_dict={name: v for name, v in data.items() if v is not None})


def heeded(
    tokens: list[list[int]], lengths: tuple[int, ...], rank: int = 0, size: int = 1, **changes: Any
) -> Tensor | None:
    call = ModelCall(0, {"input_ids": torch.tensor(tokens)}, drawn=nemo(**changes))
    layout = CallLayout(lengths, len(tokens) == 1)
    (found,) = trained_positions([call], [layout], NEMO_RL.samples, rank, size)
    return found


def test_trained_positions_predict_a_masked_token_or_are_last() -> None:
    found = NEMO_RL.samples(nemo())
    assert found is not None and [flags.int().tolist() for _, flags in found] == FLAGS
    assert [ids.tolist() for ids, _ in found] == [IDS[0].tolist(), IDS[1, :4].tolist()]


def test_masks_are_laid_out_as_the_call_is() -> None:
    rows = heeded(IDS.tolist(), (6, 6))
    assert rows is not None and rows.int().tolist() == [FLAGS[0], [*FLAGS[1], 0, 0]]
    packed = heeded([[1, 2, 3, 4, 5, 6, 0, 0, 7, 8, 9, 1, 0, 0, 0]], (8, 4, 3))
    assert packed is not None
    assert packed.int().tolist() == [[*FLAGS[0], 0, 0, *FLAGS[1], 0, 0, 0]]
    slices = [[1, 2, 0, 0, 7, 1]], [[3, 4, 5, 6, 8, 9]]  # of the zig-zag, each sample by itself
    flags = [[[0, 0, 0, 0, 0, 1]], [[1, 1, 1, 1, 1, 1]]]
    for rank, tokens in enumerate(slices):
        mine = heeded(tokens, (8, 4), rank, 2)
        assert mine is not None and mine.int().tolist() == flags[rank]


@pytest.mark.parametrize(
    ("tokens", "lengths", "changes"),
    [
        ([[1, 2, 3, 4, 5, 6, 7, 8, 9, 2]], (6, 4), {}),  # another token
        ([[9, 2, 3, 4, 5, 6, 7, 8, 9, 1]], (6, 4), {}),  # another one, without loss
        ([[7, 8, 9, 1, 1, 2, 3, 4, 5, 6]], (4, 6), {}),  # another order
        ([[1, 2, 3, 4, 5, 6, 7, 8, 9, 1]], (10,), {}),  # another number of samples
        ([[1, 2, 3, 4, 5, 7, 8, 9, 1]], (5, 4), {}),  # a sample is shorter
        ([[1, 2, 3, 4, 5, 6, 7, 8, 9, 1]], (6, 4), {"token_mask": None}),
        ([[1, 2, 3, 4, 5, 6, 7, 8, 9, 1]], (6, 4), {"token_mask": MASK[:, 1:]}),
        ([[1, 2, 3, 4, 5, 6, 7, 8, 9, 1]], (6, 4), {"token_mask": MASK[:1]}),
    ],
)
def test_where_a_mask_does_not_fit_all_positions_count(
    tokens: list[list[int]], lengths: tuple[int, ...], changes: dict[str, Any]
) -> None:
    assert heeded(tokens, lengths, **changes) is None


def test_one_call_without_a_mask_is_enough() -> None:
    good = ModelCall(0, {"input_ids": IDS}, drawn=nemo())
    layout = CallLayout((6, 6), False)
    for other in (ModelCall(1, {"input_ids": IDS}), ModelCall(1, {}, drawn=nemo())):
        found = trained_positions([good, other], [layout] * 2, NEMO_RL.samples, 0, 1)
        assert found == [None, None]


@pytest.fixture
def model() -> Iterator[Any]:
    with one_rank():
        yield small_model()


@pytest.mark.parametrize("mode", ["fits", "too little"])
def test_prompts_of_such_a_trainer_have_no_output_layer(model: Any, mode: str) -> None:
    contract, items = Contract(logits=True), steps.group(1, 4)
    if mode == "fits":
        for item in items:
            item["loss_mask"][:, :11] = 0  # none of the prompt

    def step(data_iterator: Iterator[Any], model: Any) -> Any:
        batch = next(data_iterator)
        output = model(batch["tokens"], batch["position_ids"], None)
        return output, contract.loss_func(batch)

    def samples(item: Any) -> list[tuple[Tensor, Tensor]]:
        flags = item["loss_mask"] != 0
        flags[:, :11] = False
        return list(zip(item["tokens"], flags, strict=True))

    found = {}
    for callbacks in (Callbacks(), Callbacks(samples=samples)):
        schedule = PrefixSchedule(PrefixConfig(min_gain=0), callbacks)
        steps.zero_gradients(model)
        if mode == "too little" and callbacks.samples:
            with pytest.raises(UserError, match=r"a gradient reaches.*TRAINER_MASKS=false"):
                steps.call(schedule, step, model, items)
            return
        steps.call(schedule, step, model, items)
        inner = [segment for segment in schedule.report.forest.segments if segment.inner]
        found[any(segment.scored for segment in inner)] = steps.gradients(model)
        steps.call(schedule, step, model, items, forward_only=True)
        assert any(s.scored for s in schedule.report.forest.segments if s.inner)
    terms = {name: float(gradient.abs().max()) for name, gradient in found[True].items()}
    steps.assert_gradients(found[False], steps.Reference(found[True], terms), 1000)
