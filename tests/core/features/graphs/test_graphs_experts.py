"""Layers of experts, and of latents, on CUDA graphs; launches are noted and launched again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_prefix.features.graphs import cut_layer, layers
from megatron_prefix.lab.models.build import unwrap
from tests.core.features.graphs.test_graphs import as_without, config, made, steps
from tests.harness.one_rank import one_rank, small_model
from tests.harness.recorded import RecordedGraph

pytestmark = pytest.mark.turns


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def test_experts_run_once_in_a_segment(
    recorded_graphs: type[RecordedGraph],
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
    spec = {"moe_layer_freq": (False, True)}
    plain, model = (small_model("tiny-moe", spec=spec) for _ in range(2))
    as_without(model, plain, config())  # on those of the dense one
    assert caplog.text.count("a layer is put together differently") == 2  # of each model


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
