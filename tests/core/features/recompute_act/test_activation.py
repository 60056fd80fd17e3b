"""What MLPs' activation functions give, dropped and computed again: memory policy
"recompute_act"."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.lab.models.build import unwrap
from tests.harness import steps
from tests.harness.failures import items
from tests.harness.one_rank import small_model

pytestmark = pytest.mark.usefixtures("on_one_rank_frozen")
ACTIVATIONS = {
    "swiglu with biases": dict(add_bias_linear=True),
    "clamped": dict(
        bias_activation_fusion=False, activation_func_clamp_value=0.1, glu_linear_offset=0.5
    ),
    "gelu with biases": dict(gated_linear_unit=False, activation_func=F.gelu, add_bias_linear=True),
    "gelu, unfused": dict(
        gated_linear_unit=False, bias_activation_fusion=False, activation_func=F.gelu
    ),
    "every layer recomputed": dict(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    ),
}  # fmt: skip


def step(model, memory):
    """The gradients of one."""
    config = PrefixConfig(min_gain=0, chunk_tokens=6, kernel="math", memory=memory)
    return steps.run(PrefixSchedule(config), steps.Contract().step, model, items()).gradients


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_are_bitwise_the_same(name):
    model = small_model(config_overrides=ACTIVATIONS[name])
    alike(model)
    assert all(one.any() for one in steps.gradients(model).values())


@pytest.mark.parametrize("memory", ["retain", "recompute_act"])
def test_it_is_not_kept(memory, monkeypatch):
    """Of the first layer's when the second one runs."""
    model, alive = small_model(), []
    layers, given = unwrap(model).decoder.layers, []
    second = layers[0].mlp.linear_fc2.forward

    def watched(one):
        given.append(weakref.ref(one))
        return second(one)

    def looked(*_):
        if torch.is_grad_enabled():
            gc.collect()
            found = (one() for one in given)
            alive.extend(one is not None and one.untyped_storage().nbytes() > 0 for one in found)
        given.clear()

    monkeypatch.setattr(layers[0].mlp.linear_fc2, "forward", watched)
    handle = layers[1].register_forward_pre_hook(looked)
    try:
        step(model, memory)
    finally:
        handle.remove()
    assert alive and set(alive) == {memory == "retain"}


def test_nothing_is_left_of_a_step_that_fails(monkeypatch):
    """While what lies between both products runs again."""
    model, calls = small_model(config_overrides=ACTIVATIONS["gelu, unfused"]), []
    wanted, mlp = step(model, "recompute_act"), unwrap(model).decoder.layers[0].mlp
    activated = mlp.activation_func

    def failing(x):
        calls.append(torch.is_grad_enabled())
        if not calls[-1]:
            raise ZeroDivisionError("in backward")
        return activated(x)

    with monkeypatch.context() as patch:
        patch.setattr(mlp, "activation_func", failing)
        with pytest.raises(ZeroDivisionError, match="in backward"):
            step(model, "recompute_act")
    assert calls.count(False) == 1 < len(calls)
    again = step(model, "recompute_act")
    assert all(torch.equal(gradient, again[key]) for key, gradient in wanted.items())


def test_nothing_is_kept_after_backward(monkeypatch):
    """Though a segment's output is, and with it the nodes of its graph."""
    model, products, outputs = small_model(), [], []
    mlp = unwrap(model).decoder.layers[0].mlp
    first, second = mlp.linear_fc1.forward, mlp.linear_fc2.forward

    def watched(one):
        found = first(one)
        if found[0].requires_grad:
            products.append(StorageWeakRef(found[0].untyped_storage()))
        return found

    def kept(one):
        outputs.append(second(one)[0])
        return outputs[-1], None

    monkeypatch.setattr(mlp.linear_fc1, "forward", watched)
    monkeypatch.setattr(mlp.linear_fc2, "forward", kept)
    step(model, "recompute_act")
    assert products and all(storage.expired() for storage in products)


class ReadsItsInput(MLP):
    """What lies between its products is more than the first of them."""

    def forward(self, hidden_states, **_):
        gate, up = self.linear_fc1(hidden_states)[0].chunk(2, -1)
        return self.linear_fc2(F.silu(gate) * up * hidden_states.mean(-1, keepdim=True).sigmoid())


class ReadsTwice(MLP):
    """It reads the second product's input once more."""

    def forward(self, hidden_states, **_):
        gate, up = self.linear_fc1(hidden_states)[0].chunk(2, -1)
        given = F.silu(gate) * up
        return self.linear_fc2(given)[0] + given.mean(-1, keepdim=True), None


class AddsItsInput(MLP):
    """Megatron's forward is a part of its own."""

    def forward(self, hidden_states, **_):
        found, bias = super().forward(hidden_states)
        return found + hidden_states, bias


@pytest.mark.parametrize("own", [ReadsItsInput, ReadsTwice, AddsItsInput])
@pytest.mark.parametrize("of", ["the class", "the instance"])
def test_a_trainers_own_forward_is_left_alone(own, of):
    model = small_model()
    for layer in unwrap(model).decoder.layers:
        if of == "the class":
            layer.mlp.__class__ = own
        elif own is not AddsItsInput:
            layer.mlp.forward = own.forward.__get__(layer.mlp)
    alike(model)


def writing_gelu(x):
    return x.mul_(2) * 1


def gelu_in_place(x):
    return x.relu_()


def no_gelu(x):
    return x


@pytest.mark.parametrize("function", [writing_gelu, gelu_in_place, no_gelu])
def test_an_activation_that_writes_its_input_is_left_alone(function):
    alike(small_model(config_overrides=dict(
        gated_linear_unit=False, bias_activation_fusion=False, activation_func=function
    )))  # fmt: skip


def alike(model):
    """Both policies give the same gradients."""
    whole, light = step(model, "retain"), step(model, "recompute_act")
    for key, gradient in whole.items():
        assert torch.equal(gradient, light[key]), key
