"""Models and settings that a hook could take for something else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule

from megatron_prefix import features, trainers
from megatron_prefix.errors import CannotShare
from megatron_prefix.features.vision import models
from megatron_prefix.megatron.install import language_model, uninstall
from megatron_prefix.refusals import table
from tests.harness import steps
from tests.harness.one_group import assert_bitwise, items, run, schedule_with
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import Contract
from tests.oracle.model import Owner


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def plain_model(**spec: Any) -> Any:
    return small_model(wrap_ddp=False, spec=spec)


def aligned(found: Any, twin: Any) -> None:
    wanted = steps.plain(twin, Contract(), items())
    steps.assert_gradients(found[1], wanted, sum(one["tokens"].numel() for one in items()))


def test_two_language_models_are_stocks() -> None:
    model = Owner(plain_model())
    model.other = plain_model()
    with pytest.raises(CannotShare, match="2 language models"):
        language_model(model)
    expected = run(stock_schedule(), model)
    schedule = schedule_with(mode="auto")
    assert_bitwise(run(schedule, model), expected)
    assert schedule.report is not None and schedule.report.fallback_count == 1


def test_hooks_on_gradients_are_refused_in_any_step() -> None:
    model, schedule = plain_model(), schedule_with()
    run(schedule, model)
    parameter = next(model.parameters())
    handle = parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    with pytest.raises(CannotShare, match="hooks on the gradient"):
        run(schedule, model)
    handle.remove()
    run(schedule, model)
    uninstall(model)


def test_a_window_without_an_end_is_none() -> None:
    model = plain_model()
    for window in ((-1, -1), (-1, 0), None):
        model.config.window_size = window
        run(schedule_with(), model)
        uninstall(model)
    model.config.window_size = (4, 0)  # its layers were built without one
    aligned(run(schedule_with(), model), plain_model())


def test_an_empty_argument_does_not_get_lost() -> None:
    model = plain_model()

    class Filled(Contract):
        def step(self, data_iterator: Any, model: Any) -> Any:
            batch = next(data_iterator)
            output = model(
                batch["tokens"], batch["position_ids"], None, labels=batch["labels"],
                loss_mask=batch["loss_mask"], inference_context=None, extra_block_kwargs={},
                **({"packed": {}} if named else {}),
            )  # fmt: skip
            return output, self.loss_func(batch)

    named = False
    aligned(run(schedule_with(), model, Filled()), plain_model())
    named = True
    stock = model.forward

    def forward(
        input_ids: Any, position_ids: Any, attention_mask: Any, packed: Any = None, **others: Any
    ) -> Any:
        return stock(input_ids, position_ids, attention_mask, **others)

    model.forward = forward
    with pytest.raises(CannotShare, match="packed, which is empty"):
        run(schedule_with(), model, Filled())


@pytest.mark.parametrize("name", ["NeMo-RL", "verl"])
def test_a_trainers_vision_language_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo-RL's are refused by name, as none was tried in it; its other models are not."""
    trainer = next(one for one in trainers.TRAINERS if one.name == name)
    monkeypatch.setattr(trainers, "running_trainer", lambda: trainer)
    model, shares = small_model(), []
    for has_images in (False, True):
        for module, asked in ((models, "has_images"), (features, "is_of_images")):
            monkeypatch.setattr(module, asked, lambda *_, has_images=has_images: has_images)
        ours = schedule_with(mode="auto", min_speedup=0.01)
        run(ours, model)
        assert ours.report is not None
        shares.append(ours.report.decision.share)
    refused = trainer.images is not None
    assert shares == [True, not refused] and refused == (name == "NeMo-RL")
    decision = ours.report.decision
    assert (decision.fallback and decision.reason.endswith(table.MULTIMODAL.fix)) == refused
