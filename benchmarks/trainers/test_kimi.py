"""The real layers of Kimi K3, of Megatron-Bridge and of miles, from sources that are there already.

The variable TRAINER_SOURCES names a folder with checkouts `Megatron-Bridge`, and of miles at its
pull request 1825 `miles-k3`; without it the tests are skipped. flash-linear-attention has
stand-ins, transformer-engine's modules are Megatron's, and what computes in fp32 does so in fp64.
Megatron-Bridge's needs megatron-core 0.20.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import megatron.core
import pytest
import torch
from packaging.version import Version

from benchmarks.trainers import kimi
from megatron_prefix.lab.models.local import keep_float64
from tests import judge
from tests.cases import FAMILIES, Family, Row, row
from tests.harness.quantised import quantised
from tests.oracle import model

SOURCES = {
    "bridge": ("Megatron-Bridge/src", "megatron.bridge.models.kimi", "kimi_k3_layers"),
    "miles": ("miles-k3", "miles_plugins.models.kimi_k3", "layers"),
}
PACKAGES = ("miles", "miles.backends", "miles.backends.megatron_utils")
FORMS = {"one": ("one", "thd"), "tp2_sp": ("one",), "pp2": ("one",), "ep2": ("one",)}
RAN = [
    *(("bridge", layout) for layout in FORMS),
    *(("miles", layout) for layout in ("one", "tp2_sp", "pp2", "cp2", "ep2")),
]


def _layers(trainer: str) -> Any:
    """A trainer's module, without the starts of its packages."""
    from megatron.core.extensions import transformer_engine as engine
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    vars(engine).update(
        TEColumnParallelLinear=ColumnParallelLinear, TERowParallelLinear=RowParallelLinear,
        TELinear=kimi.Duplicated, TEDotProductAttention=kimi.CausalAttention,
    )  # fmt: skip
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    folder, package, name = SOURCES[trainer]
    root = Path(os.environ["TRAINER_SOURCES"], folder)
    parts = package.split(".")
    names = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    for each in (*names, *PACKAGES):
        if each != "megatron":
            sys.modules[each] = types.ModuleType(each)
            sys.modules[each].__path__ = [str(root.joinpath(*each.split(".")))]
    return importlib.import_module(f"{package}.{name}")


def _exact(language: Any) -> None:
    """In fp64, and with gradients that Megatron sums where their marks ask for it."""
    for parameter in language.parameters():
        parameter.data = parameter.data.double()
        if hasattr(parameter, "sum_gradients_across_tp_domain"):
            parameter.sequence_parallel = language.config.sequence_parallel
    for layer in language.decoder.layers:
        keep_float64(layer)
        if hasattr(layer.mlp, "router"):
            layer.mlp.forward = _without_tokens(layer.mlp.forward)


def _without_tokens(stock: Any) -> Any:
    """The forward of experts, as miles' fork of Megatron has it: it takes tokens for routers by
    hash, which Kimi K3 has none of."""

    def forward(x: torch.Tensor, *args: Any, input_ids: Any = None, **options: Any) -> Any:
        return stock(x, *args, **options)

    return forward


@contextlib.contextmanager
def _real(trainer: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, module in kimi.modules().items():
            patch.setitem(sys.modules, name, module)
        found = _layers(trainer)
        own = kimi.own_layers(found.KimiK3Attention, found.KimiK3TransformerLayer)
        with own, quantised(_exact):
            yield


def _rows(layout: str, name: str) -> Sequence[Row]:
    plain = [row(name, "small", form=form) for form in FORMS.get(layout, ("one",))]
    return [*plain, row(name, "recompute chunks", form="one", recompute="full")]


@pytest.mark.parametrize(("trainer", "layout"), RAN)
def test_real_layers(trainer: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention residuals, Kimi Delta Attention and latent attention; with experts in EP2."""
    folder = Path(os.environ.get("TRAINER_SOURCES", ""), SOURCES[trainer][0])
    if not os.environ.get("TRAINER_SOURCES") or not folder.is_dir():
        pytest.skip("TRAINER_SOURCES names no folder with it")
    if (trainer == "bridge") != (Version(megatron.core.__version__) >= Version("0.20")):
        pytest.skip("it is for another megatron-core")
    experts = {} if layout == "ep2" else {"num_moe_experts": None}
    spec = {"num_layers": 4, "layernorm_epsilon": 1e-2, **experts}
    monkeypatch.setitem(model.AROUND, "real", lambda case: _real(trainer))
    monkeypatch.setitem(
        FAMILIES, "real", Family("tiny-deepseek", spec, own_attention=True, around="real")
    )
    judge.check(layout, _rows(layout, "real"))
