"""Multi-token prediction in packs, padded and not, and in rows.

Megatron moves the labels of a pack by `cu_seqlens_q`, the ends without padding, in a row that has
padding: what it takes for a sample begins in the one before (`_roll_tensor_packed_seq` in
megatron/core/transformer/multi_token_prediction.py). Segments move them by sample, wherever its
padding is, so a padded pack gives what the same pack without padding gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_prefix.errors import CannotShare
from megatron_prefix.lab import numerics
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.megatron.stock import stock_schedule
from tests.harness import calls
from tests.harness.calls import ROWS, Form, Trainer
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
            batch = next(one for one in self.batches if one["tokens"] is given["input_ids"])
            places = [torch.arange(length) for length in batch["lengths"]]
            packed = self.form.packed
            given["position_ids"] = torch.cat(places)[None] if packed else torch.stack(places)
            return model(**given)

        return super().step(iterator, call)


def gradients(schedule: Any, form: Form, own_loss: bool = True) -> dict[str, Tensor]:
    """Of a step; without the trainer's own loss that of multi-token prediction is left alone."""
    model, trainer = model_of(), WithPositions(form, 3, Layout())
    unwrap(model).config.calculate_per_token_loss = form.per_token
    for batch in trainer.batches if not own_loss else ():
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
FORMS = {
    "packs": Form(),
    "packs per token": Form(per_token=True),
    "packs without a mask": Form(mask=False),
    "rows": ROWS,
    "rows per token": Form(packed=False, per_token=True),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_calls(name: str) -> None:
    schedule = schedule_with()
    found = gradients(schedule, FORMS[name])
    assert distance(found, gradients(stock_schedule(), FORMS[name])) <= LIMIT
    forest = schedule.report.forest  # type: ignore[union-attr]
    assert forest.executed_tokens < forest.raw_tokens


def test_padded_packs_give_what_packs_without_padding_give() -> None:
    """And Megatron's schedule does not: of the layer's own loss 0.49 of a gradient is wrong."""
    padded = Form(pad=4)
    expected = gradients(stock_schedule(), Form(), own_loss=False)
    assert distance(gradients(stock_schedule(), padded, own_loss=False), expected) > 0.4
    assert distance(gradients(schedule_with(), Form(), own_loss=False), expected) <= LIMIT
    assert distance(gradients(schedule_with(), padded, own_loss=False), expected) <= LIMIT


@pytest.mark.parametrize("masked", [True, False])
def test_positions_behind_the_last_sample(masked: bool) -> None:
    """Megatron leaves them where they are: they must not count."""

    class Longer(WithPositions):
        def _batch(self, *args: Any) -> dict[str, Any]:
            batch = super()._batch(*args)
            for name in ("tokens", "labels", "loss_mask", "weight"):
                more = torch.full((1, 3), 0 if masked else 1, dtype=batch[name].dtype)
                batch[name] = torch.cat([batch[name], more * (name == "loss_mask")], 1)
            return batch

        def step(self, iterator: Any, model: Any) -> Any:
            def call(**given: Any) -> Any:
                given["position_ids"] = torch.arange(given["input_ids"].shape[1])[None]
                return model(**given)

            return Trainer.step(self, iterator, call)

    def run(schedule: Any) -> dict[str, Tensor]:
        return calls.run_step(schedule, Longer(Form(), 3, Layout()), [model_of()])[1]

    if masked:  # Megatron's unfused rotary embedding refuses them, transformer-engine's does not
        assert all(one.isfinite().all() for one in run(schedule_with()).values())
        return
    with pytest.raises(CannotShare, match="behind its last sample"):
        run(schedule_with())


def test_the_samples_are_uneven() -> None:
    lengths = [one["true"] for one in WithPositions(Form(pad=4), 3, Layout()).batches]
    assert len({*np.concatenate(lengths)}) > 3 and any(n % 4 for n in np.concatenate(lengths))
