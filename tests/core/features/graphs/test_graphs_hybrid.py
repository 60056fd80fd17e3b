"""Recurrent layers on CUDA graphs; launches are noted and launched again on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_prefix.features.graphs import layers
from megatron_prefix.features.graphs.kinds import GRAPHED, Graphed
from megatron_prefix.features.recurrent import delta
from megatron_prefix.features.recurrent.gdn import GatedDeltaNet
from megatron_prefix.features.recurrent.mamba import Mamba2
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.layers.mlp import MLP
from megatron_prefix.megatron.install import installed
from tests.core.features.graphs.test_graphs import as_without, config, made, same, steps, without
from tests.harness.hybrid import GDN, MAMBA, gated_delta, mamba
from tests.harness.one_rank import one_rank, small_model

pytestmark = pytest.mark.turns


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


AUX = {"moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 0.5}
UNTRAINED = ("router", "norm")


@pytest.mark.parametrize(
    ("name", "fields", "trained"),
    [
        (GDN, gated_delta(2), ("linear_fc2",)),
        (MAMBA, mamba("M*M"), ("norm",)),
        (MAMBA, mamba("M*M"), ("A_log",)),
        ("tiny-moe", AUX, ()),
        ("tiny-deepseek", {**AUX, "moe_layer_freq": (False, True)}, ()),
    ],
)
@pytest.mark.usefixtures("recorded_graphs", "cores_in_fp64")
def test_most_parameters_may_be_frozen(
    name: str, fields: dict[str, Any], trained: tuple[str, ...]
) -> None:
    """Where nothing is named: routers and norms."""
    models = [small_model(name, spec=fields) for _ in range(2)]
    for key, parameter in (pair for model in models for pair in model.named_parameters()):
        of = [word in key for word in trained or UNTRAINED]
        parameter.requires_grad_(any(of) if trained else not any(of))
    as_without(*models, config())


@pytest.mark.parametrize(
    ("kind", "name", "fields"),
    [
        (GatedDeltaNet, GDN, gated_delta(4)),
        (Mamba2, MAMBA, mamba("-M*M-")),
        (MLP, MAMBA, mamba("-M*M-")),
    ],
)
@pytest.mark.usefixtures("recorded_graphs", "cores_in_fp64")
def test_layers_of_one_kind_may_have_none(
    kind: type,
    name: str,
    fields: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The others have theirs, and a line says so."""
    monkeypatch.setitem(GRAPHED, kind, Graphed.NOTHING)  # type: ignore[arg-type]
    as_without(*(small_model(name, spec=fields) for _ in range(2)), config())
    assert f"layers of {kind.name} run without CUDA graphs" in caplog.text


@pytest.mark.usefixtures("recorded_graphs")
def test_a_failure_between_convolution_and_rule_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = small_model(GDN, spec=gated_delta(2))
    before = steps(model, config(chunk_tokens=8))
    with monkeypatch.context() as patch:
        patch.setattr(delta.LayerStates, "leave", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            steps(model, config(chunk_tokens=8), 1)
    for one, other in zip(steps(model, config(chunk_tokens=8)), before, strict=True):
        same(one, other)


class Scaled(torch.nn.Conv1d):
    """Whose weight is another tensor in every call; a graph in front of it would leave one."""

    @property
    def weight(self) -> Any:  # type: ignore[override]
        """The parameter's values."""
        return 1.0 * dict(self.named_parameters())["weight"]


def _another_weight(module: Any) -> None:
    module.conv1d.__class__ = Scaled


def _nobodys_parameter(module: Any) -> None:
    stock, more = module.in_proj.forward, torch.zeros((), dtype=torch.float64, requires_grad=True)
    module.in_proj.forward = lambda x: (stock(x)[0] + more, None)


@pytest.mark.parametrize(
    ("change", "said"), [(_another_weight, "other weights"), (_nobodys_parameter, "no module")]
)
@pytest.mark.usefixtures("recorded_graphs")
def test_what_cannot_be_captured_leaves_others_theirs(
    change: Callable[[Any], None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, graphed = (small_model(GDN, spec=gated_delta(4)) for _ in range(2))
    for model in (plain, graphed):
        for layer in unwrap(model).decoder.layers[::2]:
            change(layer.self_attention)
    ours = steps(graphed, config())
    assert made(graphed).captures > 0 and not made(graphed).refused
    assert caplog.text.count("layers of GatedDeltaNet and MLP run without CUDA graphs") == 1
    assert said in caplog.text
    for one, other in zip(ours, without(plain, config()), strict=True):
        same(one, other)


@pytest.mark.usefixtures("recorded_graphs", "cores_in_fp64")
@pytest.mark.parametrize("name", [GDN, MAMBA])
def test_the_core_runs_in_every_segment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as without graphs, and with its states: what graphs have is only around it."""
    spec = gated_delta(2) if name == GDN else mamba("M*-")
    counts = []
    for seen in (1, 10**9):
        monkeypatch.setattr(layers, "SEEN_BEFORE", seen)
        model, calls = small_model(name, spec=spec), []
        with monkeypatch.context() as patch:
            init = delta.LayerStates.__init__

            def noted(self: Any, *args: Any, init: Any = init, calls: list = calls) -> None:
                calls.append(1)
                init(self, *args)

            patch.setattr(delta.LayerStates, "__init__", noted)
            steps(model, config(chunk_tokens=8))
        assert (made(model).captures > 0) == (seen == 1)
        hooks, all_layers = installed(model), len(unwrap(model).decoder.layers)
        if seen == 1:
            assert len(made(model).layers) == all_layers - (hooks.keys_only is not None)
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0
