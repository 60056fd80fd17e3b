"""Multi-token prediction in packs that are padded.

Megatron moves the labels of a pack by `cu_seqlens_q`, the ends without padding, in a row that has
padding: what it takes for a sample begins in the one before (`_roll_tensor_packed_seq` in
megatron/core/transformer/multi_token_prediction.py). Segments move them by sample, so such packs
are refused; where `cu_seqlens_q` counts padding, too, both schedules are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_prefix.errors import CannotShare
from megatron_prefix.lab import numerics
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.megatron.stock import stock_schedule
from tests.harness import calls
from tests.harness.calls import Form, Trainer
from tests.harness.mtp import model_of
from tests.harness.one_group import schedule_with
from tests.harness.one_rank import one_rank


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


class WithPositions(Trainer):
    """Megatron moves position_ids, too, and needs them."""

    def step(self, iterator: Any, model: Any) -> Any:
        def call(**given: Any) -> Any:
            if given["input_ids"] is None:
                return model(**given)
            batch = next(one for one in self.batches if one["tokens"] is given["input_ids"])
            places = [torch.arange(length) for length in batch["lengths"]]
            packed = self.form.packed
            given["position_ids"] = torch.cat(places)[None] if packed else torch.stack(places)
            return model(**given)

        return super().step(iterator, call)


def gradients(schedule: Any, form: Form) -> dict[str, Tensor]:
    """Of a step without the trainer's own loss: that of multi-token prediction is left alone."""
    model, trainer = model_of(), WithPositions(form, 3, Layout())
    for batch in trainer.batches:
        batch["weight"].zero_()
    return calls.run_step(schedule, trainer, [model])[1]


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of a gradient, relative to its own largest element, or a hundredth of the
    largest of all."""
    floor = 0.01 * max(float(one.abs().max()) for one in expected.values())
    return max(
        float((found[name] - one).abs().max()) / max(float(one.abs().max()), floor)
        for name, one in expected.items()
    )


LIMIT = numerics.tolerance(torch.float64, 200)


def test_packs_whose_ends_leave_padding_out_are_refused() -> None:
    """Of the layer's own loss 0.49 of a gradient is wrong in Megatron's schedule."""
    padded = Form(pad=4)
    expected = gradients(stock_schedule(), Form())
    wrong = gradients(stock_schedule(), padded)
    assert distance(wrong, expected) > 0.4
    with pytest.raises(CannotShare, match="leaves out padding"):
        gradients(schedule_with(), padded)
    fallen_back = gradients(schedule_with(mode="auto"), padded)
    assert all(torch.equal(fallen_back[name], one) for name, one in wrong.items())


def test_packs_whose_ends_count_padding_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """They give what the same packs give without padding."""

    def with_padded_ends(**fields: Any) -> PackedSeqParams:
        padded = fields["cu_seqlens_q_padded"]
        return PackedSeqParams(**fields | {"cu_seqlens_q": padded.clone(), "cu_seqlens_kv": padded})

    expected = gradients(stock_schedule(), Form())
    monkeypatch.setattr(calls, "PackedSeqParams", with_padded_ends)
    for schedule in (stock_schedule(), schedule_with()):
        assert distance(gradients(schedule, Form(pad=4)), expected) <= LIMIT


class Longer(Trainer):
    """Its packs go on behind the last sample, where labels count or not."""

    def __init__(self, counts: bool) -> None:
        super().__init__(Form(), 3, Layout())
        for batch in self.batches:
            for name in ("tokens", "labels", "loss_mask", "weight"):
                value = float(counts and name == "loss_mask")
                batch[name] = torch.nn.functional.pad(batch[name], (0, 3), value=value)

    def step(self, iterator: Any, model: Any) -> Any:
        def call(**given: Any) -> Any:
            given["position_ids"] = torch.arange(given["input_ids"].shape[1])[None]
            return model(**given)

        return super().step(iterator, call)


def test_positions_behind_the_last_sample() -> None:
    """Megatron leaves them where they are, so they must not count. (Its unfused rotary embedding
    takes none of them, transformer-engine's does.)"""
    found = calls.run_step(schedule_with(), Longer(counts=False), [model_of()])[1]
    assert all(one.isfinite().all() for one in found.values())
    with pytest.raises(CannotShare, match="behind its last sample"):
        calls.run_step(schedule_with(), Longer(counts=True), [model_of()])


def test_the_samples_are_uneven() -> None:
    lengths = [one["true"] for one in WithPositions(Form(pad=4), 3, Layout()).batches]
    assert len({*np.concatenate(lengths)}) > 3 and any(n % 4 for n in np.concatenate(lengths))
