"""Trainers that another order of forward steps and losses would change: they keep stock's."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.megatron.install import language_model
from megatron_prefix.refusals import table
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import steps
from tests.harness.one_group import assert_bitwise, items
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import Contract, Microbatch

PLAIN = Contract()


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def call(batch: Microbatch, model: Any, **others: Any) -> Any:
    return model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"],
        loss_mask=batch["loss_mask"], **others,
    )  # fmt: skip


class Trainer:
    """A trainer; its forward step and loss keep what they share in attributes."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.last = 0.0
        self.static: Microbatch | None = None

    def prepare(self, model: Any) -> None:
        """Before its first step."""

    def batch(self, iterator: Iterator[Microbatch]) -> Microbatch:
        return next(iterator)

    def step(self, iterator: Iterator[Microbatch], model: Any) -> Any:
        batch = self.batch(iterator)
        return call(batch, model), partial(self.loss, batch)

    def loss(self, batch: Microbatch, output: Any) -> Any:
        return PLAIN.loss_func(batch)(output)


class Twice(Trainer):
    def step(self, iterator: Iterator[Microbatch], model: Any) -> Any:
        batch = self.batch(iterator)
        other = call(batch, model).detach()
        return call(batch, model) + 0 * other, partial(self.loss, batch)


class Never(Trainer):
    def step(self, iterator: Iterator[Microbatch], model: Any) -> Any:
        batch = self.batch(iterator)
        parameter = next(model.parameters())
        return parameter.sum() * batch["loss_mask"], partial(self.loss, batch)


class InLoss(Trainer):
    def step(self, iterator: Iterator[Microbatch], model: Any) -> Any:
        self.model = model
        return super().step(iterator, model)

    def loss(self, batch: Microbatch, output: Any) -> Any:
        with torch.no_grad():
            reference = call(batch, self.model)
        return super().loss(batch, output * reference.exp().clamp(max=2.0))


class Reentrant(Trainer):
    def step(self, iterator: Iterator[Microbatch], model: Any) -> Any:
        batch = self.batch(iterator)
        start = torch.ones((), requires_grad=True)
        output = checkpoint(lambda one: call(batch, model) * one, start, use_reentrant=True)
        return output, partial(self.loss, batch)


class Passing(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class UnderAMode(Trainer):
    def step(self, iterator: Iterator[Microbatch], model: Any) -> Any:
        with Passing():
            return super().step(iterator, model)


class Shortened(Trainer):
    """A head that returns one position less, as some fused log-probs do."""

    def prepare(self, model: Any) -> None:
        inner = language_model(model)
        stock = inner.forward
        inner.forward = lambda *args, **kwargs: stock(*args, **kwargs)[:, 1:]

    def loss(self, batch: Microbatch, output: Any) -> Any:
        shorter = {name: batch[name][:, 1:] for name in ("labels", "loss_mask", "weight")}
        return super().loss({**batch, **shorter}, output)


class Static(Trainer):
    """One buffer for the tokens of all microbatches; `write` fills it."""

    write: Callable[[torch.Tensor, torch.Tensor], Any] = staticmethod(torch.Tensor.copy_)

    def batch(self, iterator: Iterator[Microbatch]) -> Microbatch:
        batch = next(iterator)
        if self.static is None:
            tokens = torch.from_numpy(np.zeros(tuple(batch["tokens"].shape), np.int64))
            self.static = {**batch, "tokens": tokens}
        type(self).write(self.static["tokens"], batch["tokens"])
        return {**batch, "tokens": self.static["tokens"]}


class StaticData(Static):
    write = staticmethod(lambda there, value: there.data.copy_(value))


class StaticNumpy(Static):
    write = staticmethod(lambda there, value: np.copyto(there.numpy(), value.numpy()))


class ListOfLast(Trainer):
    """What a forward step leaves for its loss in a list, as miles does."""

    def step(self, iterator: Iterator[Microbatch], model: Any) -> Any:
        batch = self.batch(iterator)
        self.log[:] = [batch]
        return call(batch, model), partial(self.of_list, self.log)

    def of_list(self, log: list[Microbatch], output: Any) -> Any:
        return self.loss(log[-1], output)


class DrawsInBoth(Trainer):
    draw: Callable[[], float] = staticmethod(lambda: float(torch.rand(())))

    def batch(self, iterator: Iterator[Microbatch]) -> Microbatch:
        batch = next(iterator)
        return {**batch, "weight": batch["weight"] * (1 + type(self).draw())}

    def loss(self, batch: Microbatch, output: Any) -> Any:
        return super().loss(batch, output * (1 + type(self).draw()))


class DrawsInPython(DrawsInBoth):
    draw = staticmethod(random.random)


class DrawsInNumPy(DrawsInBoth):
    draw = staticmethod(lambda: float(np.random.rand()))  # as trainers do


class Leaves(Trainer):
    """A loss that the next forward step looks at."""

    def step(self, iterator: Iterator[Microbatch], model: Any) -> Any:
        batch = self.batch(iterator)
        batch = {**batch, "weight": batch["weight"] * (1 + self.last)}
        return call(batch, model), partial(self.loss, batch)

    def loss(self, batch: Microbatch, output: Any) -> Any:
        found = super().loss(batch, output)
        self.last = float(found[0].detach().tanh())
        return found


class SameDict:
    """An iterator that yields one dict with other values."""

    def __init__(self, data: list[Microbatch]) -> None:
        self._data, self._one = iter(data), dict[str, Any]()

    def __iter__(self) -> SameDict:
        return self

    def __next__(self) -> Microbatch:
        self._one.update(next(self._data))
        return self._one


ODD = {
    Twice: table.TWO_CALLS,
    Never: table.NO_CALL,
    InLoss: table.CALL_IN_LOSS,
    UnderAMode: table.TORCH_MODES,
    Reentrant: table.CALL_IN_BACKWARD,
    Shortened: table.OTHER_SHAPE,
    Static: table.OVERWRITTEN,
    StaticData: table.OVERWRITTEN,
    StaticNumpy: table.OVERWRITTEN,
    ListOfLast: table.OVERWRITTEN,
    DrawsInBoth: table.RANDOM_IN_BOTH,
    DrawsInPython: table.RANDOM_IN_BOTH,
    DrawsInNumPy: table.RANDOM_IN_BOTH,
    Leaves: table.LOSS_LEAVES,
}


def watching(mode: str = "auto") -> PrefixSchedule:
    config = PrefixConfig(min_gain=0, kernel="math", mode=mode, min_speedup=0.01)
    return PrefixSchedule(config, looks_first=True)


def two_steps(schedule: Any, trainer: Trainer, wrapped: Any = iter) -> list[Any]:
    """Logs and gradients of two steps, from the same random states."""
    model, found = small_model(), []
    trainer.prepare(model)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    for _ in range(2):
        steps.zero_gradients(model)
        data = items()
        logs = schedule(
            forward_step_func=trainer.step, data_iterator=wrapped(data), model=model,
            num_microbatches=len(data), seq_length=data[0]["tokens"].shape[1],
            micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        found.append((logs, steps.gradients(model)))
    return found


@pytest.mark.parametrize("mode", ["auto", "observe"])
@pytest.mark.parametrize("kind", ODD, ids=lambda kind: kind.__name__)
def test_an_odd_trainer_gets_what_stock_gives(kind: type[Trainer], mode: str) -> None:
    schedule = watching(mode)
    found, wanted = two_steps(schedule, kind()), two_steps(stock_schedule(), kind())
    for mine, its in zip(found, wanted, strict=True):
        assert_bitwise(mine, its)
    assert schedule.report is not None
    text = schedule.report.decision.reason
    assert text.endswith(ODD[kind].fix) and not schedule.report.decision.share
    assert schedule.report.fallback_count == (2 if mode == "auto" else 0)


def test_mode_auto_gives_untried_fp8_to_the_stock_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_prefix.run.route.is_untried", lambda config: True)
    schedule = watching("auto")
    found, wanted = two_steps(schedule, Trainer()), two_steps(stock_schedule(), Trainer())
    for mine, its in zip(found, wanted, strict=True):
        assert_bitwise(mine, its)
    assert schedule.report is not None
    assert schedule.report.decision.reason.endswith(table.FP8_UNTRIED.fix)


@pytest.mark.parametrize("kind", ODD, ids=lambda kind: kind.__name__)
def test_mode_on_refuses_an_odd_trainer(kind: type[Trainer]) -> None:
    with pytest.raises(UserError) as caught:
        two_steps(watching("on"), kind())
    assert caught.value.refusal is not None


def test_one_dict_again_and_again() -> None:
    schedule = watching()
    found = two_steps(schedule, Trainer(), SameDict)
    for mine, its in zip(found, two_steps(stock_schedule(), Trainer(), SameDict), strict=True):
        assert_bitwise(mine, its)
    assert schedule.report is not None
    assert schedule.report.decision.reason.endswith(table.DRAWN_AGAIN.fix)


def test_an_ordinary_trainer_shares_from_its_second_step() -> None:
    schedule = watching()
    first, second = two_steps(schedule, Trainer())
    wanted = two_steps(stock_schedule(), Trainer())
    assert_bitwise(first, wanted[0])
    assert schedule.report is not None and schedule.report.decision.share
    assert schedule.report.fallback_count == 0
    reference = steps.plain(small_model(wrap_ddp=False), PLAIN, items())
    steps.assert_gradients(second[1], reference, sum(one["tokens"].numel() for one in items()))


def test_a_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    two_steps(watching(), Twice())
    assert sum("stock schedule for this step" in one.getMessage() for one in caplog.records) == 1


@pytest.mark.parametrize(
    ("mode", "line"),
    [
        ("on", "prefix sharing is on: rank 0 computes {:,} of {:,} tokens ({:.1f}x predicted)"),
        (
            "observe",
            "prefix sharing is observed: rank 0 would compute {:,} of {:,} tokens ({:.1f}x"
            " predicted)",
        ),
    ],
)
def test_what_is_shared_is_logged_once(mode, line, caplog: pytest.LogCaptureFixture) -> None:
    schedule = watching(mode)
    two_steps(schedule, Trainer())
    assert schedule.report is not None
    forest = schedule.report.forest
    assert 0 < forest.executed_tokens < forest.raw_tokens
    predicted = schedule.report.decision.predicted_speedup
    expected = line.format(forest.executed_tokens, forest.raw_tokens, predicted)
    assert [text for text in caplog.messages if "prefix sharing is" in text] == [expected]


class OwnInfo(Trainer):
    """Its loss sets a number for itself; its forward step has the name for another, and not now."""

    def __init__(self) -> None:
        super().__init__()
        self.info: dict[str, int] = {}

    def step(self, iterator: Iterator[Microbatch], model: Any) -> Any:
        batch = self.batch(iterator)
        if self.last:
            batch = {**batch, "scale": batch["batch_num_tokens"]}
        return call(batch, model), partial(self.loss, batch)

    def loss(self, batch: Microbatch, output: Any) -> Any:
        self.info["batch_num_tokens"] = batch["tokens"].numel()
        return super().loss(batch, output)


@pytest.mark.parametrize("version", ["", "0.9.1", "0.9.2"])
def test_what_verls_losses_set_for_themselves_is_in_nobodys_way(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Of versions that were tried; elsewhere a name that both have may be read."""
    if version:
        monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
        monkeypatch.setattr(sys.modules["verl"], "__version__", version, raising=False)
    schedule = watching()
    two_steps(schedule, OwnInfo())
    assert schedule.report is not None
    decision = schedule.report.decision
    assert decision.share == (version == "0.9.1")
    assert decision.share or decision.reason.endswith(table.LOSS_LEAVES.fix)


class Touchy(Trainer):
    """What looking must not touch: a property that raises, and a tensor without strides."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = torch.eye(3).to_sparse()

    @property
    def world(self) -> Any:
        raise RuntimeError("not before the job has begun")

    def loss(self, batch: Microbatch, output: Any) -> Any:
        if self.log:
            return self.world, self.sparse
        return super().loss(batch, output)


def test_looking_ends_no_step() -> None:
    schedule = watching()
    first, _ = two_steps(schedule, Touchy())
    assert_bitwise(first, two_steps(stock_schedule(), Touchy())[0])
    assert schedule.report is not None and schedule.report.decision.share


class DrawsBesideDropout(DrawsInBoth):
    """Its forward step draws, and so does the model, by turns."""

    def prepare(self, model: Any) -> None:
        inner = language_model(model)
        inner.config.hidden_dropout = 0.1
        for layer in inner.decoder.layers:
            layer.hidden_dropout = 0.1

    def loss(self, batch: Microbatch, output: Any) -> Any:
        return Trainer.loss(self, batch, output)


@pytest.mark.parametrize("mode", ["auto", "observe"])
def test_a_model_that_is_refused_is_never_captured(mode: str) -> None:
    schedule = watching(mode)
    found = two_steps(schedule, DrawsBesideDropout())
    for mine, its in zip(found, two_steps(stock_schedule(), DrawsBesideDropout()), strict=True):
        assert_bitwise(mine, its)
    assert schedule.report is not None
    assert schedule.report.decision.reason.endswith(
        "copies of a prompt would drop different values"
    )


class Unmasked(Trainer):
    """A loss that looks at positions that the call's loss_mask leaves out."""

    def loss(self, batch: Microbatch, output: Any) -> Any:
        return super().loss({**batch, "loss_mask": torch.ones_like(batch["loss_mask"])}, output)


def test_a_loss_of_masked_positions_gets_what_stock_gives() -> None:
    schedule = watching()
    found, wanted = two_steps(schedule, Unmasked()), two_steps(stock_schedule(), Unmasked())
    for mine, its in zip(found, wanted, strict=True):
        assert_bitwise(mine, its)
    assert schedule.report is not None
    assert schedule.report.decision.reason.endswith(table.STRAY_GRADIENT.fix)


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_mask_over_tokens_leaves_out_no_position(mode: str) -> None:
    """ROLL's: its losses have masks of their own, over the positions that predict these tokens."""
    schedule = watching(mode)
    schedule.callbacks = Callbacks(masks_tokens=True)
    *_, (_, found) = two_steps(schedule, Unmasked())
    *_, (_, wanted) = two_steps(stock_schedule(), Unmasked())
    assert schedule.report is not None and schedule.report.decision.share
    terms = {name: float(gradient.abs().max()) for name, gradient in wanted.items()}
    steps.assert_gradients(found, steps.Reference(wanted, terms), 1000)
