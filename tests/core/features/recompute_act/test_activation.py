"""What MLPs' activation functions give, dropped and computed again: memory policy
"recompute_act"."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.recompute_act.activation import Between
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.predict.execution import Execution
from megatron_prefix.lab.predict.kinds import memory_of
from megatron_prefix.lab.predict.model import footprint_of
from megatron_prefix.layers import mlp as kind
from megatron_prefix.run.schedule import PrefixSchedule
from tests.core.alignment.test_variants import items
from tests.harness import steps
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import Contract

pytestmark = pytest.mark.turns

ACTIVATIONS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "swiglu with biases": dict(add_bias_linear=True),
    "swiglu, unfused": dict(bias_activation_fusion=False),
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


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        gc.collect()
        gc.freeze()  # the collector, which some of these tests call in every layer, looks at less
        yield
        gc.unfreeze()


def step(model: Any, memory: str) -> dict[str, Tensor]:
    """The gradients of one."""
    steps.zero_gradients(model)
    config = PrefixConfig(min_gain=0, chunk_tokens=6, kernel="math", memory=memory)
    steps.call(PrefixSchedule(config), Contract().step, model, items())
    return {name: gradient.clone() for name, gradient in steps.gradients(model).items()}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_are_bitwise_the_same(name: str) -> None:
    model = small_model(config_overrides=ACTIVATIONS[name])
    alike(model)
    assert all(one.any() for one in steps.gradients(model).values())


@pytest.mark.parametrize("memory", ["retain", "recompute_act"])
def test_it_is_not_kept(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first layer's when the second one runs."""
    model, alive = small_model(), []
    layers = unwrap(model).decoder.layers
    given: list[Any] = []
    second = layers[0].mlp.linear_fc2.forward

    def watched(one: Tensor) -> Any:
        given.append(weakref.ref(one))
        return second(one)

    def looked(*_: Any) -> None:
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


def test_every_layer_drops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one, too, of which inner segments without loss compute K and V only."""
    model, emptied = small_model(), set()
    second = Between.__init__

    def noted(one: Any, module: Any, *products: Any) -> None:
        emptied.add(id(module))
        second(one, module, *products)

    monkeypatch.setattr(Between, "__init__", noted)
    step(model, "recompute_act")
    assert emptied == {id(layer.mlp) for layer in unwrap(model).decoder.layers}


def test_nothing_is_left_of_a_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """While what lies between both products runs again."""
    model, calls = small_model(config_overrides=ACTIVATIONS["gelu, unfused"]), []
    wanted, mlp = step(model, "recompute_act"), unwrap(model).decoder.layers[0].mlp
    activated = mlp.activation_func

    def failing(x: Tensor) -> Tensor:
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


def test_nothing_is_kept_after_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a segment's output is, and with it the nodes of its graph."""
    model, products, outputs = small_model(), [], []
    mlp = unwrap(model).decoder.layers[0].mlp
    first, second = mlp.linear_fc1.forward, mlp.linear_fc2.forward

    def watched(one: Tensor) -> Any:
        found = first(one)
        if found[0].requires_grad:
            products.append(StorageWeakRef(found[0].untyped_storage()))
        return found

    def kept(one: Tensor) -> Any:
        outputs.append(second(one)[0])
        return outputs[-1], None

    monkeypatch.setattr(mlp.linear_fc1, "forward", watched)
    monkeypatch.setattr(mlp.linear_fc2, "forward", kept)
    step(model, "recompute_act")
    assert products and all(storage.expired() for storage in products)


@pytest.mark.parametrize(
    ("name", "dense"), [("llama3-8b", 1.0), ("qwen3-8b", 1.0), ("moonlight-16b-a3b", 0.25)]
)
def test_what_is_dropped_is_counted(name: str, dense: float) -> None:
    """On average over layers; of experts nothing is dropped."""
    spec = resolve(name, num_layers=4)
    width = spec.ffn_hidden_size
    assert footprint_of(spec, Execution(tp=2)).act == dense * width
    for form in (Execution(recompute="full"), Execution(recompute="selective", modules=("mlp",))):
        assert footprint_of(spec, form).act == 0


class ReadsItsInput(MLP):
    """What lies between its products is more than the first of them."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        gate, up = self.linear_fc1(hidden_states)[0].chunk(2, -1)
        return self.linear_fc2(F.silu(gate) * up * hidden_states.mean(-1, keepdim=True).sigmoid())


class ReadsTwice(MLP):
    """It reads the second product's input once more."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        gate, up = self.linear_fc1(hidden_states)[0].chunk(2, -1)
        given = F.silu(gate) * up
        return self.linear_fc2(given)[0] + given.mean(-1, keepdim=True), None


class AddsItsInput(MLP):
    """Megatron's forward is a part of its own."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        found, bias = super().forward(hidden_states)
        return found + hidden_states, bias


@pytest.mark.parametrize("own", [ReadsItsInput, ReadsTwice, AddsItsInput])
@pytest.mark.parametrize("of", ["the class", "the instance"])
def test_a_trainers_own_forward_is_left_alone(own: type[MLP], of: str) -> None:
    model = small_model()
    for layer in unwrap(model).decoder.layers:
        if of == "the class":
            layer.mlp.__class__ = own
        elif own is not AddsItsInput:
            layer.mlp.forward = own.forward.__get__(layer.mlp)
    alike(model)


def writing_gelu(x: Tensor) -> Tensor:
    return x.mul_(2) * 1


def gelu_in_place(x: Tensor) -> Tensor:
    return x.relu_()


def no_gelu(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("function", [writing_gelu, gelu_in_place, no_gelu])
def test_an_activation_that_writes_its_input_is_left_alone(function: Any) -> None:
    alike(small_model(config_overrides=dict(
        gated_linear_unit=False, bias_activation_fusion=False, activation_func=function
    )))  # fmt: skip


def test_a_hook_finds_what_the_second_product_gets() -> None:
    model, seen = small_model(), []
    products = [layer.mlp.linear_fc2 for layer in unwrap(model).decoder.layers]
    for one in products:
        one.register_forward_hook(lambda _, given, __: seen.append(given[0]))
    alike(model)
    assert all(one.isfinite().all() for one in seen)


@pytest.mark.parametrize("whole", [True, False])
def test_a_checkpoint_of_torch_finds_what_it_saves(whole: bool) -> None:
    """Its second forward fills the graph of the first one, and nobody takes its own output."""
    model = small_model()
    decoder = unwrap(model).decoder
    for module in [decoder] if whole else decoder.layers:
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    alike(model)


def test_an_mlp_of_a_models_own_needs_no_configuration() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor, **_: Any) -> tuple[Tensor, None]:
            return F.silu(x), None

    model = small_model()
    for layer in unwrap(model).decoder.layers:
        layer.mlp = Own()
    alike(model)


@pytest.mark.parametrize("function", [F.gelu, F.relu, lambda x: F.relu(x).square()])
def test_the_first_product_is_not_kept_instead_of_an_input(function: Any) -> None:
    """ReLU keeps what it gives, and its input is dropped by itself."""
    model, products, alive = small_model(config_overrides=dict(
        gated_linear_unit=False, bias_activation_fusion=False, activation_func=function
    )), [], []  # fmt: skip
    first, last = unwrap(model).decoder.layers

    def noted(_: Any, __: Any, found: Any) -> None:
        products.append(StorageWeakRef(found[0].untyped_storage()))

    def looked(*_: Any) -> None:
        alive.append(not all(one.expired() for one in products))

    first.mlp.linear_fc1.register_forward_hook(noted)
    last.register_forward_pre_hook(looked)
    step(model, "retain")
    keeps = alive[0]
    alive.clear(), products.clear()
    step(model, "recompute_act")
    numbers = memory_of(kind.MLP(), unwrap(model).config, Execution())
    assert alive[0] == keeps == (numbers.act > 0) == (function is F.gelu)


def alike(model: Any) -> None:
    """Both policies give the same gradients."""
    whole, light = step(model, "retain"), step(model, "recompute_act")
    for key, gradient in whole.items():
        assert torch.equal(gradient, light[key]), key
