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
from tests.core.features.graphs.test_graphs import config, made, same, steps, without
from tests.harness.hybrid import GDN, MAMBA, gated_delta, mamba
from tests.harness.one_rank import one_rank, small_model
from tests.harness.recorded import RecordedGraph, cores_in_fp64, recorded_graphs  # noqa: F401
from tests.harness.rows import rows

pytestmark = pytest.mark.turns


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 24, "moe_aux_loss_coeff": 1.0,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gated delta, MLP": (GDN, gated_delta(4), {}),
    "gated delta, MLP, chunks": (GDN, gated_delta(4), {"chunk_tokens": 8}),
    "gated delta, experts": (GDN, {**gated_delta(4), **EXPERTS}, {"chunk_tokens": 8}),
    "gated delta alone": (GDN, gated_delta(2, 3), {"chunk_tokens": 8}),
    "gated delta, recomputed": (
        GDN, gated_delta(4), {"memory": "recompute", "chunk_tokens": 8}),
    "scan": (MAMBA, mamba("M*M-M-"), {}),
    "scan, chunks": (MAMBA, mamba("M*M-M-"), {"chunk_tokens": 8}),
    "scan, then attention that turns": (MAMBA, {**mamba("M*-M"), "rope": True}, {}),
    "scan alone": (MAMBA, mamba("MM"), {"chunk_tokens": 8}),
    "scan behind an MLP": (MAMBA, mamba("-M*"), {"segment_tokens": 8}),
    "scan, offloaded": (MAMBA, mamba("M*M-"), {"memory": "offload", "chunk_tokens": 8}),
    "scan, recomputed": (MAMBA, mamba("M*M-"), {"memory": "recompute", "chunk_tokens": 8}),
}  # fmt: skip
PRODUCTS = (
    "gated delta, MLP", "gated delta, MLP, chunks", "scan", "scan, chunks", "scan, recomputed",
)  # fmt: skip
STEPS = {"scan, offloaded": 3}
"""It has no graphs before; the others' are captured in the first."""


@pytest.mark.parametrize("case", rows(CASES, PRODUCTS))
@pytest.mark.usefixtures("cores_in_fp64")
def test_steps_are_those_without(
    case: str,
    recorded_graphs: type[RecordedGraph],  # noqa: F811
) -> None:
    name, fields, options = CASES[case]
    plain, graphed = (small_model(name, spec=fields) for _ in range(2))
    ours = steps(graphed, config(**options), STEPS.get(case, 2))
    hooks = installed(graphed)
    assert hooks is not None and len(made(graphed).layers) == len(hooks.model.decoder.layers) - (
        hooks.keys_only is not None
    )
    assert made(graphed).captures > 0 and recorded_graphs.replays > 0
    others = without(plain, config(**options), len(ours))
    for one, other in zip(ours, others, strict=True):
        same(one, other)


PARAMETERS = ("norm", "conv1d", "A_log", "linear_fc2")
TRAINED = [(name, one) for name in (GDN, MAMBA) for one in PARAMETERS]


@pytest.mark.parametrize(("name", "trained"), rows(TRAINED, [TRAINED[3], TRAINED[4], TRAINED[6]]))
@pytest.mark.usefixtures("recorded_graphs", "cores_in_fp64")
def test_most_parameters_may_be_frozen(name: str, trained: str) -> None:
    fields = gated_delta(4) if name == GDN else mamba("M*M-")
    plain, graphed = (small_model(name, spec=fields) for _ in range(2))
    for model in (plain, graphed):
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(trained in key)
    ours = steps(graphed, config())
    assert made(graphed).captures > 0
    for one, other in zip(ours, without(plain, config()), strict=True):
        same(one, other)


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
    plain, graphed = (small_model(name, spec=fields) for _ in range(2))
    ours = steps(graphed, config())
    assert made(graphed).captures > 0
    assert f"layers of {kind.name} run without CUDA graphs" in caplog.text  # type: ignore[attr-defined]
    for one, other in zip(ours, without(plain, config()), strict=True):
        same(one, other)


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
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


def test_gates_on_attention_cross_its_core(
    recorded_graphs: type[RecordedGraph],  # noqa: F811
) -> None:
    """Qwen3-Next's: what is computed in front of attention, and read behind it."""
    plain, graphed = (small_model(GDN, spec=gated_delta(3, 1)) for _ in range(2))
    assert graphed.module.config.attention_output_gate
    ours = steps(graphed, config(chunk_tokens=8))
    assert made(graphed).captures > 0 and recorded_graphs.replays > 0
    others = without(plain, config(chunk_tokens=8))
    for one, other in zip(ours, others, strict=True):
        same(one, other)
        assert torch.equal(one.logprobs, other.logprobs)
