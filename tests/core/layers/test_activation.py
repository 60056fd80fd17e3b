"""What MLPs' activation functions give, dropped and computed again: memory policy
"recompute_act"."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.layers.model import footprint_of
from megatron_prefix.plan.footprint import Execution
from megatron_prefix.run.schedule import PrefixSchedule
from tests.core.alignment.test_variants import items
from tests.harness import steps
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import Contract

ACTIVATIONS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "swiglu with biases": dict(add_bias_linear=True),
    "swiglu, unfused": dict(bias_activation_fusion=False),
    "clamped": dict(
        bias_activation_fusion=False, activation_func_clamp_value=0.1, glu_linear_offset=0.5
    ),
    "gelu with biases": dict(gated_linear_unit=False, activation_func=F.gelu, add_bias_linear=True),
    "squared relu": dict(
        gated_linear_unit=False, bias_activation_fusion=False,
        activation_func=lambda x: F.relu(x).square(),
    ),
    "every layer recomputed": dict(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def step(model: Any, memory: str) -> dict[str, Tensor]:
    """The gradients of one."""
    steps.zero_gradients(model)
    config = PrefixConfig(min_gain=0, chunk_tokens=6, kernel="math", memory=memory)
    steps.call(PrefixSchedule(config), Contract().step, model, items())
    return {name: gradient.clone() for name, gradient in steps.gradients(model).items()}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_are_bitwise_the_same(name: str) -> None:
    model = small_model(config_overrides=ACTIVATIONS[name])
    whole, light = step(model, "retain"), step(model, "recompute_act")
    assert whole.keys() == light.keys() and all(one.any() for one in whole.values())
    for key, gradient in whole.items():
        assert torch.equal(gradient, light[key]), key


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


def test_nothing_is_left_of_a_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither between both products, nor while what lies between them runs again."""
    model = small_model()
    wanted, forward, calls = step(model, "recompute_act"), MLP.forward, []

    def failing(self: MLP, *args: Any, **kwargs: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        if not calls[-1]:
            raise ZeroDivisionError("in backward")
        return forward(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(MLP, "forward", failing)
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
