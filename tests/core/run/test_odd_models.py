"""Models and settings that a hook could take for something else."""

import pytest
import torch
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_prefix.errors import CannotShare
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.refusals import table
from megatron_prefix.run.read.random_numbers import RandomUse
from tests.harness import steps
from tests.harness.one_group import items, run, schedule_with
from tests.harness.one_rank import small_model

pytestmark = pytest.mark.usefixtures("on_one_rank")


# Random numbers that a model draws inside its call, and what may move a generator -----------------


def from_tracker(x):
    with get_cuda_rng_tracker().fork():
        return x * (1 + torch.rand(()))


@pytest.mark.parametrize(
    ("noise", "generator"),
    [
        (lambda x: x + 0.1 * torch.rand_like(x), "torch"),
        (from_tracker, "Megatron's model-parallel-rng"),
    ],
)
def test_mode_on_refuses_noise_and_leaves_all_as_it_was(noise, generator):
    model = small_model()
    layer = unwrap(model).decoder.layers[1]
    layer.register_forward_hook(lambda _, args, output: (noise(output[0]), *output[1:]))
    torch.manual_seed(1)
    state, tracked = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
    with pytest.raises(CannotShare, match=generator) as caught:
        run(schedule_with(mode="on", segment_tokens=8, chunk_tokens=8), model)
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
