"""Model calls without gradients beside a forward step's own: a reference with adapters off."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.refusals import table
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import lora, steps
from tests.harness.one_group import assert_bitwise, items
from tests.harness.one_rank import one_rank, small_model
from tests.harness.ranks import run_ranks

SMALL: dict[str, Any] = {"segment_tokens": 8, "chunk_tokens": 8}
"""More than one wave, so that segments run between forward steps that go on."""


class Switched(lora.Adapted):
    """An adapter that can be off; the switch is the class's until it is used, as peft's is."""

    enabled = True

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        if self.enabled:
            return super().forward(x, *args, **kwargs)
        output, bias = self.to_wrap(x, *args, **kwargs)
        return output, bias


@contextlib.contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    adapters = [one for one in model.modules() if isinstance(one, Switched)]
    for one in adapters:
        one.enabled = False
    yield
    for one in adapters:
        one.enabled = True


def adapted(model: Any) -> Any:
    lora.adapt(model)
    for module in model.modules():
        if isinstance(module, lora.Adapted):
            module.__class__ = Switched
    return model


def call(model: Any, batch: dict[str, Any], **given: Any) -> Tensor:
    given = {"labels": batch["labels"], "loss_mask": batch["loss_mask"], **given}
    found: Tensor = model(batch["tokens"], batch["position_ids"], None, **given)
    return found


def preferring(batch: dict[str, Any], reference: Tensor) -> Callable[[Tensor], Any]:
    """A loss on whole samples against a reference's: [samples, positions] each."""

    def loss(output: Tensor) -> Any:
        rewards = ((reference - output) * batch["loss_mask"] * batch["weight"]).sum(1)
        found = -torch.nn.functional.logsigmoid(rewards).sum()
        logs = {"uid": batch["uid"], "loss": found.detach().clone()}
        return found, batch["loss_mask"].sum().to(torch.int32), logs

    return loss


def reference_first(iterator: Iterator[dict[str, Any]], model: Any) -> Any:
    batch = next(iterator)
    with torch.no_grad(), adapters_off(model):
        reference = call(unwrap(model), batch)  # as ms-swift does, without its wrappers
    return call(model, batch), preferring(batch, reference)


def reference_last(iterator: Iterator[dict[str, Any]], model: Any) -> Any:
    batch = next(iterator)
    output = call(model, batch)
    with torch.no_grad(), adapters_off(model):
        reference = call(model, batch)
    return output, preferring(batch, reference)


def reference_of_logits(iterator: Iterator[dict[str, Any]], model: Any) -> Any:
    batch = next(iterator)
    with torch.no_grad(), adapters_off(model):
        logits = call(model, batch, labels=None)
    picked = logits.log_softmax(-1).gather(-1, batch["labels"][..., None])[..., 0]
    return call(model, batch), preferring(batch, -picked)


def adapters_off_around_the_call(iterator: Iterator[dict[str, Any]], model: Any) -> Any:
    batch = next(iterator)
    with adapters_off(model):
        output = call(model, batch)
    return output, preferring(batch, torch.zeros_like(output))


def twice_with_gradients(iterator: Iterator[dict[str, Any]], model: Any) -> Any:
    batch = next(iterator)
    return call(model, batch) + call(model, batch), preferring(batch, torch.zeros(()))


def schedule(mode: str = "auto") -> PrefixSchedule:
    config = PrefixConfig(  # nobody adds up gradients of ranks here, so each computes its own
        min_gain=0, kernel="math", mode=mode, min_speedup=0.01, across_ranks="off", **SMALL
    )
    return PrefixSchedule(config, looks_first=True)


def two_steps(runs: Any, step: Any, model: Any) -> list[Any]:
    found = []
    for _ in range(2):
        steps.zero_gradients(model)
        logs = steps.call(runs, step, model, items())
        found.append((logs, steps.gradients(model)))
    return found


def assert_alike(found: list[Any], wanted: list[Any]) -> None:
    tokens = sum(one["tokens"].numel() for one in items())
    for (logs, gradients), (expected, reference) in zip(found, wanted, strict=True):
        sizes = {name: float(one.abs().max()) for name, one in reference.items()}
        steps.assert_gradients(gradients, steps.Reference(reference, sizes), tokens)
        for mine, its in zip(logs, expected, strict=True):
            assert mine["uid"] == its["uid"]
            torch.testing.assert_close(mine["loss"], its["loss"], rtol=1e-12, atol=1e-12)


@pytest.fixture
def one() -> Iterator[None]:
    with one_rank():
        yield


@pytest.mark.parametrize("mode", ["auto", "on"])
@pytest.mark.parametrize("step", [reference_first, reference_last], ids=lambda step: step.__name__)
def test_the_model_itself_answers_a_call_without_gradients(one: None, step: Any, mode: str) -> None:
    ours = schedule(mode)
    found = two_steps(ours, step, adapted(small_model(wrap_ddp=False)))
    assert_alike(found, two_steps(stock_schedule(), step, adapted(small_model(wrap_ddp=False))))
    assert ours.report is not None and ours.report.decision.share
    assert len(ours.report.forest.segments) > 3


KEPT = {
    reference_of_logits: table.BESIDE_LOGITS,
    adapters_off_around_the_call: table.SWITCHED,
    twice_with_gradients: table.TWO_CALLS,
}


@pytest.mark.parametrize("step", KEPT, ids=lambda step: step.__name__)
def test_other_steps_stay_with_the_stock_schedule(one: None, step: Any) -> None:
    ours = schedule()
    found = two_steps(ours, step, adapted(small_model(wrap_ddp=False)))
    wanted = two_steps(stock_schedule(), step, adapted(small_model(wrap_ddp=False)))
    for mine, its in zip(found, wanted, strict=True):
        assert_bitwise(mine, its)
    assert ours.report is not None and ours.report.decision.reason.endswith(KEPT[step].fix)
    with pytest.raises(UserError) as caught:
        two_steps(schedule("on"), step, adapted(small_model(wrap_ddp=False)))
    assert caught.value.refusal is KEPT[step]


def _built(layout: Layout, seed: int = 0) -> Any:
    spec = resolve("tiny-llama", num_layers=2).with_vocab(64)
    options: dict[str, Any] = {"config_overrides": {"variable_seq_lengths": True}, "seed": seed}
    return build_model(spec, layout=layout, dtype="float64", wrap_ddp=False, **options)[0]


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=2)], ids=["TP2", "DP2"])
def test_ranks_answer_calls_without_gradients(layout: Layout) -> None:
    def on_rank() -> None:
        runtime.initialize(layout)
        data = items(prompt=15)  # of an even number of positions
        model, twin = (adapted(_built(layout)) for _ in range(2))
        ours = schedule()
        found, wanted = [], []
        for runs, one, kept in ((ours, model, found), (stock_schedule(), twin, wanted)):
            for _ in range(2):
                steps.zero_gradients(one)
                logs = steps.call(runs, reference_first, one, data)
                kept.append((logs, steps.gradients(one)))
        assert_alike(found, wanted)
        assert ours.report is not None and ours.report.decision.share

    run_ranks(layout.world_size, on_rank)


def test_a_reference_model_in_stages_is_stocks() -> None:
    """It sends its hidden states with those of the model (ms-swift's DPO of all weights)."""

    def on_rank() -> None:
        runtime.initialize(Layout(pp=2))
        model, reference = (_built(Layout(pp=2), seed) for seed in (1, 2))

        def step(iterator: Iterator[dict[str, Any]], chunk: Any) -> Any:
            batch = next(iterator)
            received = chunk.decoder.input_tensor
            if received is not None:
                halves = received.chunk(2)
                reference.set_input_tensor(halves[0].detach())
                chunk.set_input_tensor(halves[1])
            with torch.no_grad():
                first = call(reference, batch)
            second = call(chunk, batch)

            def loss(output: Tensor) -> Any:
                its, own = output.chunk(2)
                return preferring(batch, its.detach())(own)

            return torch.cat([first, second]), loss

        ours = schedule()
        found = two_steps(ours, step, model)
        for mine, its in zip(found, two_steps(stock_schedule(), step, model), strict=True):
            assert_bitwise(mine, its)
        assert ours.report is not None
        assert ours.report.decision.reason.endswith(table.OTHER_SENT.fix)

    run_ranks(2, on_rank)
