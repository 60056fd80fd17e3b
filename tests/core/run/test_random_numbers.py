"""Random numbers that a model draws inside its call, and what may move a generator."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor
from torch.nn import functional

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.refusals import table
from megatron_prefix.run.read.random_numbers import RandomUse
from megatron_prefix.run.schedule import PrefixSchedule
from tests.core.features.watch.test_first_step import Trainer, two_steps, watching
from tests.harness import steps
from tests.harness.one_group import assert_bitwise, items
from tests.harness.one_rank import one_rank, small_model


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def from_tracker() -> float:
    with get_cuda_rng_tracker().fork():
        return float(torch.rand(()))


def dropped(x: Tensor) -> Tensor:
    return functional.dropout(x, 0.1, training=True)


NOISE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "torch": (lambda x: x + 0.1 * torch.rand_like(x), "torch"),
    "dropout": (dropped, "torch"),
    "tracker": (lambda x: x * (1 + from_tracker()), "Megatron's model-parallel-rng"),
}
BEFORE_SEGMENTS = {
    "python": (lambda x: x * (1 + random.random()), "Python's random"),
    "numpy": (lambda x: x * (1 + float(np.random.rand())), "NumPy"),  # as trainers do
}
"""Seen while the first step is watched only."""


class Noisy(Trainer):
    """A hook that draws, on one layer; from a step on."""

    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.noise = noise

    def prepare(self, model: Any) -> None:
        layer = unwrap(model).decoder.layers[1]
        layer.register_forward_hook(lambda _, args, output: (self.noise(output[0]), *output[1:]))


class NoisyAttention(Noisy):
    """The hook is on core attention, whose own draws do not count."""

    def prepare(self, model: Any) -> None:
        core = unwrap(model).decoder.layers[1].self_attention.core_attention
        core.register_forward_hook(lambda _, args, output: self.noise(output))


@pytest.mark.parametrize("kind", [Noisy, NoisyAttention])
@pytest.mark.parametrize("name", [*NOISE, *BEFORE_SEGMENTS])
def test_a_model_that_draws_stays_with_the_stock_schedule(name: str, kind: Any) -> None:
    noise, generator = (NOISE | BEFORE_SEGMENTS)[name]
    schedule, tracker = watching(), get_cuda_rng_tracker()
    states = tracker.get_states()
    found = two_steps(schedule, kind(noise))
    tracker.set_states(states)
    wanted = two_steps(stock_schedule(), kind(noise))
    for mine, its in zip(found, wanted, strict=True):
        assert_bitwise(mine, its)
    assert schedule.report is not None
    text = schedule.report.decision.reason
    assert text.endswith(table.MODEL_DRAWS.fix) and f"({generator})" in text, text


class OwnGenerator(Noisy):
    """Draws from a generator that a module holds."""

    def prepare(self, model: Any) -> None:
        layer = unwrap(model).decoder.layers[1]
        layer.noise = torch.Generator().manual_seed(3)
        layer.register_forward_hook(
            lambda one, args, output: (
                output[0] * (1 + float(torch.rand((), generator=one.noise))), *output[1:],
            )
        )  # fmt: skip


def test_a_generator_of_a_module_is_looked_at() -> None:
    schedule = watching()
    two_steps(schedule, OwnGenerator(dropped))
    assert schedule.report is not None
    assert schedule.report.decision.reason.endswith(table.MODEL_DRAWS.fix)


@pytest.mark.parametrize("name", NOISE)
def test_mode_on_refuses_it_and_leaves_all_as_it_was(name: str) -> None:
    noise, generator = NOISE[name]
    model, trainer = small_model(), Noisy(noise)
    trainer.prepare(model)
    config = PrefixConfig(min_gain=0, kernel="math", mode="on", segment_tokens=8, chunk_tokens=8)
    torch.manual_seed(1)
    state, tracked = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
    with pytest.raises(CannotShare, match=generator) as caught:
        steps.call(PrefixSchedule(config), trainer.step, model, items())
    assert caught.value.refusal is table.MODEL_DRAWS
    assert torch.equal(torch.get_rng_state(), state)
    for its_name, its_state in get_cuda_rng_tracker().get_states().items():
        assert torch.equal(its_state, tracked[its_name])
    assert all(not one.any() for one in steps.gradients(model).values())


def test_what_attention_takes_does_not_count() -> None:
    """As transformer-engine's does; a hook on attention is not attention."""
    model = unwrap(small_model())
    core = model.decoder.layers[1].self_attention.core_attention
    numbers = {"default": 5, "tracker": 7}
    stock = core.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        numbers["tracker"] += 4
        return stock(*args, **kwargs)

    def noise(*_: Any) -> None:
        numbers["default"] += 1

    def names_of_a_call() -> list[str]:
        use = RandomUse([model], dict, lambda: sum(numbers.values()))
        batch = items()[0]
        with use.watching(), use.calling() as names:
            model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return names

    core.forward = forward
    assert names_of_a_call() == [] and numbers == {"default": 5, "tracker": 11}
    for hook in (core.register_forward_pre_hook, core.register_forward_hook):
        handle = hook(noise)
        assert names_of_a_call() == ["torch.cuda"]
        handle.remove()


class ForksForNothing(Trainer):
    """Megatron's own fork around what draws nothing, as around its dropout of 0."""

    def prepare(self, model: Any) -> None:
        def forks(_: Any, args: Any, output: Any) -> Any:
            with get_cuda_rng_tracker().fork():
                return (functional.dropout(output[0], 0.0), *output[1:])

        for layer in unwrap(model).decoder.layers:
            layer.register_forward_hook(forks)


class DrawsItself(Trainer):
    """Its forward step and nothing else draws."""

    def batch(self, iterator: Any) -> Any:
        batch = next(iterator)
        return {**batch, "weight": batch["weight"] * (1 + float(torch.rand(())))}


@pytest.mark.parametrize("kind", [ForksForNothing, DrawsItself])
def test_it_is_shared_all_the_same(kind: type[Trainer]) -> None:
    schedule = watching()
    (_, second), (_, wanted) = two_steps(schedule, kind()), two_steps(stock_schedule(), kind())
    assert schedule.report is not None and schedule.report.decision.share
    tokens = sum(one["tokens"].numel() for one in items())
    sizes = {name: float(one.abs().max()) for name, one in wanted[1].items()}
    steps.assert_gradients(second[1], steps.Reference(wanted[1], sizes), tokens)
