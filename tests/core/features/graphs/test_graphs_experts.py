"""Layers of experts, and of latents, on CUDA graphs; launches are noted and launched again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from megatron_prefix.features.experts.routers import routers
from megatron_prefix.features.graphs import cut_layer, layers
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.numerics import tolerance
from megatron_prefix.run.schedule import PrefixSchedule
from tests.core.alignment.test_replay import CONTRACT, ROUTED, SIZES, items, set_action
from tests.core.features.graphs.test_graphs import TOKENS, config, made, same, steps, without
from tests.harness import steps as one_step
from tests.harness.one_rank import one_rank, small_model
from tests.harness.recorded import RecordedGraph, recorded_graphs  # noqa: F401
from tests.harness.rows import rows

pytestmark = pytest.mark.turns


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


AUX = {"moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 0.5}
PLAIN = {"rope_type": "rope", "q_lora_rank": None, "qk_layernorm": False}
MIXED = {"moe_layer_freq": (False, True, True)}
EXPERTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "losses": ("tiny-moe", AUX, {}),
    "shared expert": ("tiny-moe", {**AUX, "moe_shared_expert_intermediate_size": 24}, {}),
    "first layer dense": ("tiny-moe", {**AUX, **MIXED}, {}),
    "losses by sample": (
        "tiny-moe", {**AUX, "moe_router_load_balancing_type": "seq_aux_loss"}, {"chunk_tokens": 8}),
    "windows, sinks, biases": ("tiny-gpt-oss", {}, {}),
    "latents": ("tiny-deepseek", {**AUX, **MIXED}, {}),
    "latents, chunks": ("tiny-deepseek", {**AUX, **MIXED}, {"chunk_tokens": 8}),
    "latents, rope, plain queries": (
        "tiny-deepseek", {**PLAIN, **MIXED}, {}),
    "latents without experts": ("tiny-deepseek", {"num_moe_experts": None}, {"chunk_tokens": 8}),
    "frozen": ("tiny-moe", AUX, {}),
    "latents, frozen": ("tiny-deepseek", {**AUX, **MIXED}, {}),
}  # fmt: skip


# Shared experts go with graphs in test_graphs_ranks.py, a dense layer first with latents.
PRODUCTS = ("latents, chunks", "latents, frozen", "shared expert", "first layer dense")


@pytest.mark.parametrize("case", rows(EXPERTS, PRODUCTS))
def test_steps_with_experts_and_latents_are_those_without(
    case: str,
    recorded_graphs: type[RecordedGraph],  # noqa: F811
) -> None:
    """Every layer has graphs: none ends early. Also where routers and norms are not trained."""
    name, fields, options = EXPERTS[case]
    plain, graphed = (small_model(name, spec={"num_layers": 3, **fields}) for _ in range(2))
    for model in (plain, graphed):
        for key, parameter in model.named_parameters():
            parameter.requires_grad_("frozen" not in case or not {"router", "norm"} & parts(key))
    ours = steps(graphed, config(**options))
    assert made(graphed).captures > 0 and recorded_graphs.replays > 0
    for one, other in zip(ours, without(plain, config(**options)), strict=True):
        same(one, other)


def parts(name: str) -> set[str]:
    """Of the name of a parameter: those of its module."""
    return set(name.replace("layernorm", "norm").replace("_", ".").split("."))


def test_experts_run_once_in_a_segment(
    recorded_graphs: type[RecordedGraph],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None runs, and no router counts, while layers are captured; nor do hooks inside them end
    anything. The norm in front of them is in a graph."""
    model, ran, normed = small_model("tiny-moe"), [], []
    layer = unwrap(model).decoder.layers[1]
    layer.mlp.router.register_forward_hook(lambda *_: ran.append(1))
    norm = layer.pre_mlp_layernorm.forward
    layer.pre_mlp_layernorm.forward = lambda x: (normed.append(1), norm(x))[1]
    steps(model, config(), 3)
    with_graphs, captures = len(ran), made(model).captures
    assert captures > 0 and len(normed) < with_graphs
    monkeypatch.setattr(layers, "SEEN_BEFORE", 10**9)
    ran.clear()
    steps(model, config(), 3)
    assert with_graphs == len(ran) > 0


@pytest.mark.usefixtures("recorded_graphs")
def test_a_layer_without_megatrons_method_has_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs as before, and a line says so."""
    monkeypatch.setattr(cut_layer, "can_be_cut", lambda _: False)
    plain, model = (small_model("tiny-moe", spec={"num_layers": 3, **MIXED}) for _ in range(2))
    ours = steps(model, config())
    assert made(model).captures > 0  # of the dense one
    assert caplog.text.count("a layer is put together differently") == 1
    for one, other in zip(ours, without(plain, config()), strict=True):
        same(one, other)


@pytest.mark.usefixtures("recorded_graphs")
def test_a_capture_that_fails_keeps_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Of latents that were on their way to attention: their autograd graph has all before it."""
    model, left = small_model("tiny-deepseek"), []
    inside = unwrap(model).decoder.layers[0].self_attention.linear_kv_up_proj
    stock = inside.forward

    def failing(x: Any) -> Any:
        if made(model).cut is not None:
            left.append(weakref.ref(x.grad_fn))
            raise RuntimeError("no memory here")
        return stock(x)

    inside.forward = failing
    steps(model, config())
    assert "no memory here" in caplog.text
    gc.collect()
    assert [node() for node in left] == [None]


def routed(replays: bool) -> dict[str, Any]:
    """Gradients of the last of two steps of microbatches with routes, with graphs."""
    model = small_model("tiny-moe", spec=SIZES, config_overrides=ROUTED, wrap_ddp=False)
    set_action(RouterReplayAction.REPLAY_FORWARD if replays else None)
    given = one_step.routes_of(items())
    schedule = PrefixSchedule(config(min_gain=0, chunk_tokens=8), given)
    for _ in range(2):
        for router in routers(model).values():
            router.expert_bias.zero_()  # a step moves it
        one_step.zero_gradients(model)
        one_step.call(schedule, CONTRACT.step, model, items())
    assert (made(model).captures > 0) == (layers.SEEN_BEFORE == 1)
    return one_step.gradients(model)


@pytest.mark.usefixtures("recorded_graphs")
def test_routes_that_replay_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        ours, free = routed(replays=True), routed(replays=False)
        monkeypatch.setattr(layers, "SEEN_BEFORE", 10**9)
        others = routed(replays=True)
    finally:
        set_action(None)
    limit = tolerance(torch.float64, TOKENS)
    for name, gradient in others.items():
        assert (ours[name] - gradient).abs().max() <= limit * gradient.abs().max(), name
    assert any((free[name] - one).abs().max() > 1e-3 for name, one in others.items())
