"""State that a forward step sets on the model for its microbatch: a segment serves several."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule
from torch import Tensor, nn

from megatron_prefix.errors import CannotShare, UserError
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.refusals import table
from megatron_prefix.run.read.model_walk import WALK, ModelWalk
from tests.core.features.watch.test_first_step import Trainer, call, watching
from tests.harness import steps
from tests.harness.one_group import assert_bitwise, items
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import Microbatch

pytestmark = pytest.mark.turns


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


class Pair(NamedTuple):
    name: str
    factor: float


class Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


class Scaled(nn.Module):
    """Multiplies hidden states by what it is told to; put in front of a layer."""

    factor_of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.slot, self.factor = 0, 1.0
        self.weights = (1.0, 1.1, 1.2, 1.3, 1.4)
        self.tensor = torch.ones((), dtype=torch.float64)
        self.register_buffer("buffer", torch.ones(2, dtype=torch.float64))
        self.table, self.row = {"factor": 1.0}, [1.0, 1.0]
        self.queue, self.pair = deque([1.0]), Pair("first", 1.0)
        self.nested: dict[str, Any] = {"a": [{"b": SimpleNamespace(factor=1.0)}]}
        self.object, self.slotted = SimpleNamespace(factor=1.0), Slotted()
        self.partial = functools.partial(torch.mul, torch.ones((), dtype=torch.float64))
        self.array = np.ones(2)
        self.chosen = {0}
        self.bank = torch.linspace(1, 2, 5, dtype=torch.float64)
        self.view = self.bank[0]

    def forward(self, x: Tensor) -> Tensor:
        factor = self.weights[self.slot] * self.factor * self.table["factor"] * self.row[1]
        factor *= self.queue[0] * self.pair.factor * self.nested["a"][0]["b"].factor
        factor *= self.object.factor * self.slotted.factor * float(self.array[1])
        factor *= self.factor_of_class * (1 + min(self.chosen) / 4) * SETTINGS["factor"]
        return x * factor * self.partial(self.tensor) * self.buffer[1] * self.view


SETTINGS = {"factor": 1.0}
"""Of the module; `Scaled` reads it."""


def scaled(model: Any) -> Scaled:
    found: Scaled = unwrap(model).decoder.scaled
    return found


def put_in(model: Any) -> None:
    """`Scaled` in front of the decoder's layers."""
    inner = unwrap(model)
    inner.decoder.scaled = Scaled()
    inner.decoder.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: (
            args,
            kwargs | {"hidden_states": inner.decoder.scaled(kwargs["hidden_states"])},
        ),
        with_kwargs=True,
    )


def set_hook(model: Any, n: int) -> None:
    """A hook of the microbatch's own instead of the last one's."""
    layer = unwrap(model).decoder.layers[1]
    for number in [*layer._forward_hooks]:
        del layer._forward_hooks[number]
    layer.register_forward_hook(lambda _, args, output: (output[0] * (1 + n), *output[1:]))


def set_data(model: Any, n: int) -> None:
    scaled(model).buffer.data.fill_(1.0 + n)


def set_parameter(model: Any, n: int) -> None:
    with torch.no_grad():
        unwrap(model).decoder.final_layernorm.weight.fill_(1.0 + n)


def set_weight_data(model: Any, n: int) -> None:
    weight = unwrap(model).decoder.final_layernorm.weight
    weight.data.fill_(1.0 + n)


def set_z_loss(model: Any, n: int) -> None:
    unwrap(model).config.moe_z_loss_coeff = 0.01 * n


STATES: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "an integer slot": (lambda m, n: setattr(scaled(m), "slot", n), "scaled.slot"),
    "a float": (lambda m, n: setattr(scaled(m), "factor", 1.0 + n), "scaled.factor"),
    "z-loss coefficient": (set_z_loss, "config.moe_z_loss_coeff"),
    "a tensor": (
        lambda m, n: setattr(scaled(m), "tensor", torch.tensor(1.0 + n, dtype=torch.float64)),
        "scaled.tensor",
    ),
    "a tensor in place": (lambda m, n: scaled(m).tensor.fill_(1.0 + n), "scaled.tensor"),
    "a view": (lambda m, n: setattr(scaled(m), "view", scaled(m).bank[n]), "scaled.view"),
    "a buffer": (lambda m, n: scaled(m).buffer.fill_(1.0 + n), "scaled.buffer"),
    "a buffer replaced": (
        lambda m, n: setattr(scaled(m), "buffer", torch.full((2,), 1.0 + n, dtype=torch.float64)),
        "scaled.buffer",
    ),
    "a dict's entry": (
        lambda m, n: scaled(m).table.update(factor=1.0 + n), "scaled.table['factor']",
    ),
    "a list": (lambda m, n: scaled(m).row.__setitem__(1, 1.0 + n), "scaled.row"),
    "a deque": (lambda m, n: scaled(m).queue.__setitem__(0, 1.0 + n), "scaled.queue"),
    "a set": (lambda m, n: (scaled(m).chosen.clear(), scaled(m).chosen.add(n)), "scaled.chosen"),
    "a tuple": (lambda m, n: setattr(scaled(m), "pair", Pair("x", 1.0 + n)), "scaled.pair"),
    "an object": (
        lambda m, n: setattr(scaled(m).object, "factor", 1.0 + n), "scaled.object.factor",
    ),
    "slots": (lambda m, n: setattr(scaled(m).slotted, "factor", 1.0 + n), "scaled.slotted.factor"),
    "nested": (
        lambda m, n: setattr(scaled(m).nested["a"][0]["b"], "factor", 1.0 + n),
        "scaled.nested['a'][0]['b'].factor",
    ),
    "a partial": (
        lambda m, n: setattr(
            scaled(m), "partial", functools.partial(torch.mul, torch.tensor(1.0 + n).double())
        ),
        "scaled.partial",
    ),
    "an array": (lambda m, n: scaled(m).array.fill(1.0 + n), "scaled.array"),
    "a class": (lambda m, n: setattr(Scaled, "factor_of_class", 1.0 + n), "Scaled.factor_of_class"),
    "a global": (lambda m, n: SETTINGS.update(factor=1.0 + n), "SETTINGS['factor']"),
    "a hook": (set_hook, "layers.1._forward_hooks"),
    "a wrapper": (lambda m, n: setattr(m, "factor", 1.0 + n), "DistributedDataParallel.factor"),
    "a parameter": (set_parameter, "final_layernorm.weight"),
}  # fmt: skip
ONLY_WATCHED = {
    "a buffer's data": (set_data, "scaled.buffer"),
    "a weight's data": (set_weight_data, "final_layernorm.weight"),
}
"""Seen while the first step is watched only."""


class Setting(Trainer):
    """Sets state before its model calls from a step on; `number` is the microbatch's."""

    def __init__(self, change: Callable[[Any, int], Any], begin: int = 0) -> None:
        super().__init__()
        self.change, self.begin, self.num = change, begin * len(items()), 0

    def prepare(self, model: Any) -> None:
        put_in(model)

    def step(self, iterator: Iterator[Microbatch], model: Any) -> Any:
        batch = self.batch(iterator)
        if self.num >= self.begin:
            self.change(model, self.num % len(items()))
        self.num += 1
        return call(batch, model), functools.partial(self.loss, batch)


def some_steps(schedule: Any, trainer: Trainer, num: int = 2, **options: Any) -> list[Any]:
    model, found = small_model(**options), []
    SETTINGS["factor"] = Scaled.factor_of_class = 1.0
    trainer.prepare(model)
    torch.manual_seed(1)
    for _ in range(num):
        steps.zero_gradients(model)
        data = items()
        logs = schedule(
            forward_step_func=trainer.step, data_iterator=iter(data), model=model,
            num_microbatches=len(data), seq_length=data[0]["tokens"].shape[1],
            micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        found.append((logs, steps.gradients(model)))
    return found


def assert_stocks(found: list[Any], wanted: list[Any]) -> None:
    for mine, its in zip(found, wanted, strict=True):
        assert_bitwise(mine, its)


def reason(schedule: Any) -> str:
    assert schedule.report is not None
    text: str = schedule.report.decision.reason
    return text


@pytest.mark.parametrize("name", [*STATES, *ONLY_WATCHED])
def test_state_of_a_microbatch_stays_with_the_stock_schedule(name: str) -> None:
    change, path = (STATES | ONLY_WATCHED)[name]
    schedule = watching()
    found = some_steps(schedule, Setting(change))
    assert_stocks(found, some_steps(stock_schedule(), Setting(change)))
    text = reason(schedule)
    assert text.endswith(table.SWITCHED.fix) and path in text, text


@pytest.mark.parametrize("name", STATES)
def test_mode_on_refuses_it_by_name(name: str) -> None:
    change, path = STATES[name]
    with pytest.raises(CannotShare) as caught:
        some_steps(watching("on"), Setting(change))
    assert caught.value.refusal is table.SWITCHED and path in str(caught.value)


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("name", STATES)
def test_what_begins_in_a_later_step_is_noticed_in_that_step(name: str, late: int) -> None:
    """With its first microbatch, or when others are suspended that had called the model before."""
    change, path = STATES[name]

    def run(schedule: Any) -> list[Any]:
        trainer = Setting(change, 2)
        trainer.begin += late
        return some_steps(schedule, trainer, 3)

    schedule = watching()
    if late and name == "a parameter":
        with pytest.raises(UserError) as caught:
            run(schedule)
        assert caught.value.refusal is table.STATE_LOST and path in str(caught.value)
        return
    found, wanted = run(schedule), run(stock_schedule())
    for number in (0, 2):
        assert_bitwise(found[number], wanted[number])
    text = reason(schedule)
    assert text.endswith(table.SWITCHED.fix) and path in text, text
    assert schedule.report is not None and schedule.report.fallback_count == 1


def keeps_its_own(trainer: Any, model: Any, n: int) -> None:
    trainer.slot = n
    trainer.state = {"number": n}


def sets_it_once(trainer: Any, model: Any, n: int) -> None:
    scaled(model).factor = 1.25
    scaled(model).row = [1.0, 0.5 + 0.5]
    scaled(model).pair = Pair("first", 0.5 + 0.75)
    scaled(model).nested = {"a": [{"b": SimpleNamespace(factor=0.25 + 1)}]}
    scaled(model).view = scaled(model).bank[2]
    scaled(model).partial = functools.partial(torch.mul, SCALE)
    unwrap(model).config.calls = {"at most": 2**20 + 2}


SCALE = torch.tensor(1.5, dtype=torch.float64)


class Counting(Scaled):
    """Keeps what it sees: a number, a table by length, a running mean in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls, self.tables = 0, dict[int, Tensor]()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.mean += x.detach().mean()
        self.last = x.detach()
        self.tables.setdefault(len(x), torch.ones(len(x), 1, 1, dtype=torch.float64))
        return super().forward(x) * self.tables[len(x)]


def counts_inside(trainer: Any, model: Any, n: int) -> None:
    """Nothing outside: `Counting` is the module."""


class Innocent(Trainer):
    """Does something that changes no result of a segment."""

    def __init__(self, act: Callable[[Any, Any, int], None]) -> None:
        super().__init__()
        self.act, self.num = act, 0

    def prepare(self, model: Any) -> None:
        put_in(model)
        if self.act is counts_inside:
            unwrap(model).decoder.scaled = Counting()

    def step(self, iterator: Iterator[Microbatch], model: Any) -> Any:
        batch = self.batch(iterator)
        self.act(self, model, self.num)
        self.num += 1
        return call(batch, model), functools.partial(self.loss, batch)


@pytest.mark.parametrize("act", [keeps_its_own, sets_it_once, counts_inside])
def test_it_is_shared_all_the_same(act: Callable[[Any, Any, int], None]) -> None:
    schedule = watching()
    found, wanted = (some_steps(one, Innocent(act)) for one in (schedule, stock_schedule()))
    assert_bitwise(found[0], wanted[0])
    assert schedule.report is not None and schedule.report.decision.share, reason(schedule)
    assert_shared(found[1], wanted[1])


def assert_shared(found: Any, wanted: Any) -> None:
    tokens = sum(one["tokens"].numel() for one in items())
    sizes = {name: float(one.abs().max()) for name, one in wanted[1].items()}
    steps.assert_gradients(found[1], steps.Reference(wanted[1], sizes), tokens)


def test_a_model_takes_its_walk_with_it() -> None:
    """What is kept between steps is the model's: no copy has it, and it holds no model."""
    model, schedule = small_model(), watching("on")
    steps.call(schedule, Trainer().step, model, items())
    inner = unwrap(model)
    assert isinstance(vars(inner)[WALK], ModelWalk)
    made, arguments = vars(inner)[WALK].__reduce__()
    assert made(*arguments) is None
    assert copy.deepcopy({"walk": vars(inner)[WALK]}) == {"walk": None}
    alive = weakref.ref(vars(inner)[WALK])
    del vars(inner)[WALK]
    gc.collect()
    assert alive() is None
