"""A step that turns out not to be one that can be shared, once its segments have run (rows of such
steps: tests/test_cases_of_trainers.py); models and settings that a hook could take for others."""

import logging
import random
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.errors import CannotShare, UserError
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.runtime.groups import forget_logged_losses
from megatron_prefix.megatron.logged_losses import logged_losses
from megatron_prefix.refusals import table
from megatron_prefix.run.execute.call_outputs import CallOutputs
from megatron_prefix.run.execute.inputs import SegmentInputs
from megatron_prefix.run.read.random_numbers import RandomUse
from tests.harness import one_group, steps
from tests.harness.one_group import items, schedule_with
from tests.harness.one_rank import small_model

pytestmark = pytest.mark.usefixtures("on_one_rank")

LATER = 2
"""The first step, counted from 0, in which a trainer does something else."""
NUM_STEPS = 4


@dataclass
class Trainer:
    """A trainer whose losses draw random numbers."""

    number: int = 0
    calls: list[int] = field(default_factory=list)

    @property
    def is_later(self):
        return self.number >= LATER

    def batch(self, iterator):
        return next(iterator)

    def call(self, batch, model):
        return model(
            batch["tokens"], batch["position_ids"], None, labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )  # fmt: skip

    def step(self, iterator, model):
        batch = self.batch(iterator)
        self.calls.append(self.number)
        return self.call(batch, model), partial(self.loss, batch)

    def loss(self, batch, output):
        noise = torch.rand(()) + random.random() + np.random.rand()
        return steps.Contract().loss_func({**batch, "weight": batch["weight"] * noise})(output)


class Twice(Trainer):
    def call(self, batch, model):
        output = super().call(batch, model)
        if self.is_later:
            output = output + 0.5 * super().call(batch, model)
        return output


class Emptied(Trainer):
    """It takes what it draws apart, and its loss leaves the mask out."""

    def batch(self, iterator):
        drawn = super().batch(iterator)
        return {name: drawn.pop(name) for name in list(drawn)}

    def loss(self, batch, output):
        mask = torch.ones_like(batch["loss_mask"]) if self.is_later else batch["loss_mask"]
        return super().loss({**batch, "loss_mask": mask}, output)


def schedule_of(mode="auto"):
    config = PrefixConfig(min_gain=0, kernel="math", mode=mode, min_speedup=0.01)
    return PrefixSchedule(config, looks_first=True)


class Seen(NamedTuple):
    """What a step leaves, as far as a trainer sees it."""

    logs: list[Any]
    gradients: dict[str, torch.Tensor]
    others: dict[str, Any]


def run(schedule, trainer, model, zeroes=True):
    """Some steps, from the same random states each."""
    found = []
    for number in range(NUM_STEPS):
        trainer.number = number
        if zeroes or not number:
            steps.zero_gradients(model)
        forget_logged_losses()
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)
        data = [dict(one) for one in items()]
        logs = schedule(
            forward_step_func=trainer.step, data_iterator=iter(data), model=model,
            num_microbatches=len(data), seq_length=data[0]["tokens"].shape[1], micro_batch_size=1,
            forward_only=False,
        )  # fmt: skip
        others = {name: value.clone() for name, value in model.named_buffers()}
        others |= {name: value.clone() for name, value in logged_losses().items()}
        others["random"] = torch.get_rng_state(), random.random(), np.random.rand()
        found.append(Seen(logs, {n: g.clone() for n, g in steps.gradients(model).items()}, others))
    return found


def assert_same(found, wanted):
    steps.assert_bitwise(found, wanted)
    assert found.others.keys() == wanted.others.keys()
    for name, value in wanted.others.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found.others[name], value), name
    assert torch.equal(found.others["random"][0], wanted.others["random"][0])
    assert found.others["random"][1:] == wanted.others["random"][1:]


@pytest.mark.parametrize("wrap_ddp", [True, False])
def test_gradients_that_were_there_before_stay(wrap_ddp):
    schedule, models = schedule_of(), [small_model(wrap_ddp=wrap_ddp) for _ in range(2)]
    found = run(schedule, Emptied(), models[0], zeroes=False)
    wanted = run(stock_schedule(), Emptied(), models[1], zeroes=False)
    for name, gradient in wanted[-1].gradients.items():  # with what was added up before
        assert torch.allclose(found[-1].gradients[name], gradient, rtol=1e-9, atol=1e-12)
    assert schedule.report.fallback_count == 2
    assert schedule.report.decision.reason.endswith(table.STRAY_GRADIENT.fix)


@pytest.mark.parametrize(
    ("trainer", "refusal"), [(Twice, table.TWO_CALLS), (Emptied, table.STRAY_GRADIENT)]
)
def test_mode_on_raises_and_leaves_gradients_as_they_were(trainer, refusal):
    model, schedule = small_model(), schedule_of("on")
    with pytest.raises(UserError) as caught:
        run(schedule, trainer(), model)
    assert caught.value.refusal is refusal
    assert all(not gradient.any() for gradient in steps.gradients(model).values())


PLACES = {"a segment": (SegmentInputs, "call"), "an answer": (CallOutputs, "_places")}


@pytest.mark.parametrize("place", PLACES)
def test_an_error_while_segments_run(place, monkeypatch, caplog):
    """Of the package's own, and from inside the trainer's forward step."""
    owner, name = PLACES[place]
    stock, trainer, num = getattr(owner, name), Trainer(), [0]

    def call(*args, **kwargs):
        num[0] += trainer.is_later
        return [][1] if num[0] > 1 else stock(*args, **kwargs)

    named = {**globals(), "__name__": "megatron_prefix.run.step_run"}  # as if it were ours
    fails = FunctionType(call.__code__, named, "call", None, call.__closure__)
    monkeypatch.setattr(owner, name, fails)
    schedule = schedule_of()
    found, wanted = (
        run(schedule, trainer, small_model()),
        run(stock_schedule(), Trainer(), small_model()),
    )
    for number in range(LATER, NUM_STEPS):
        assert_same(found[number], wanted[number])
    reason = schedule.report.decision.reason
    assert "(IndexError: list index out of range)" in reason
    assert reason.endswith(table.OWN_ERROR.fix)
    (logged,) = [one for one in caplog.records if "Traceback" in one.getMessage()]
    assert logged.levelno == logging.WARNING


class Fails(Trainer):
    def loss(self, batch, output):
        if self.is_later:
            raise KeyError("the trainer's")
        return super().loss(batch, output)


def test_an_error_of_the_trainers_is_raised():
    schedule, trainer = schedule_of(), Fails()
    with pytest.raises(KeyError, match="the trainer's"):
        run(schedule, trainer, small_model())
    assert schedule.report is not None and schedule.report.fallback_count == 0
    assert trainer.calls.count(LATER) == len(items())


class Elsewhere(Twice):
    """Its batches are its own."""

    def batch(self, iterator):
        found = items()[len(self.calls) % len(items())]
        return {**found, "tokens": (found["tokens"] + len(self.calls)) % 60}


class Writes(Twice):
    def batch(self, iterator):
        found = super().batch(iterator)
        found["weight"].mul_(2.0)
        return found


@pytest.mark.parametrize(
    ("trainer", "why"), [(Elsewhere, "draw something else then"), (Writes, "write into tensors")]
)
def test_other_data_are_no_silent_change(trainer, why):
    with pytest.raises(UserError, match=why):
        run(schedule_of(), trainer(), small_model())


# Random numbers that a model draws inside its call, and what may move a generator -----------------


def from_tracker(x):
    with get_cuda_rng_tracker().fork():
        return x * (1 + torch.rand(()))


@pytest.mark.parametrize(("noise", "generator"), [
    (lambda x: x + 0.1 * torch.rand_like(x), "torch"),
    (from_tracker, "Megatron's model-parallel-rng"),
])  # fmt: skip
def test_mode_on_refuses_noise_and_leaves_all_as_it_was(noise, generator):
    model = small_model()
    layer = unwrap(model).decoder.layers[1]
    layer.register_forward_hook(lambda _, args, output: (noise(output[0]), *output[1:]))
    torch.manual_seed(1)
    state, tracked = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
    with pytest.raises(CannotShare, match=generator) as caught:
        one_group.run(schedule_with(mode="on", segment_tokens=8, chunk_tokens=8), model)
    assert caught.value.refusal is table.MODEL_DRAWS
    assert torch.equal(torch.get_rng_state(), state)
    for its_name, its_state in get_cuda_rng_tracker().get_states().items():
        assert torch.equal(its_state, tracked[its_name])
    assert all(not one.any() for one in steps.gradients(model).values())


def test_what_attention_takes_does_not_count():
    """As transformer-engine's does; a hook on attention is not attention."""
    model = unwrap(small_model())
    core = model.decoder.layers[1].self_attention.core_attention
    numbers = {"default": 5, "tracker": 7}
    stock = core.forward

    def forward(*args, **kwargs):
        numbers["tracker"] += 4
        return stock(*args, **kwargs)

    def noise(*_):
        numbers["default"] += 1

    def names_of_a_call():
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


def test_megatron_runs_models_of_other_kinds():
    model = nn.Linear(2, 2)
    model.config = TransformerConfig(num_layers=1, hidden_size=2, num_attention_heads=1)
    model.set_input_tensor, model.model_type = lambda _: None, ModelType.encoder_or_decoder

    def step(data, chunk):
        return chunk(next(data)["tokens"]), lambda out: (out.sum(), {})

    steps.run(schedule_with(mode="auto"), step, model, [{"tokens": torch.ones(2, 2)}])
    assert model.weight.grad.eq(2).all()
