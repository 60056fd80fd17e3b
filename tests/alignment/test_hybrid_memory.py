"""What recurrent layers save for backward, measured, and where their states are in a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_prefix.megatron.install import install, language_model
from megatron_prefix.models.build import unwrap
from megatron_prefix.models.presets import resolve
from megatron_prefix.offload.counted import SavedBytes
from megatron_prefix.offload.segment import addresses
from megatron_prefix.tree import Pairs
from tests.harness import hybrid, saving_kernels, steps
from tests.harness.hybrid import GDN, MAMBA
from tests.harness.one_group import schedule_with
from tests.harness.one_rank import one_rank
from tests.harness.steps import Contract

SPECS = {GDN: hybrid.gated_delta(4, every=4), MAMBA: hybrid.mamba("M-M*M-")}
FAMILIES = pytest.mark.parametrize("name", [GDN, MAMBA])


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def step(model: Any, items: list[steps.Microbatch] | None = None, **fields: Any) -> tuple[int, Any]:
    """The most bytes that autograd holds in a step, and the step's report."""
    inner = unwrap(model)
    count = SavedBytes(addresses(*inner.parameters(), *inner.buffers()))
    ours = schedule_with(**fields)
    steps.zero_gradients(model)
    with count.counting():
        steps.call(ours, Contract().step, model, items or hybrid.items())
    assert ours.report is not None and ours.report.memory is not None and count.now == 0
    return count.peak, ours.report


@FAMILIES
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_saved_bytes_are_those_that_were_predicted(
    name: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of models with attention (tests/unit/test_peak_memory.py), with spans of all lengths."""
    model = hybrid.model_of(name, spec=SPECS[name], dtype=torch.float32, recompute=recompute)
    saving_kernels.install(monkeypatch, model)
    for fields in ({}, {"chunk_tokens": 7}, {"segment_tokens": 30}, {"min_gain": 10**6}):
        for memory in ("retain", "recompute"):
            saved, report = step(model, memory=memory, **fields)
            ratio = report.memory.saved / (saved + report.cache_bytes)
            print(name, recompute, fields, memory, f"{ratio:.3f}")
            assert 0.9 <= ratio <= 1.1, f"{fields}, {memory}: {ratio:.3f}"


@FAMILIES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_of_one_recurrent_layer(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With transformer-engine's norms, and in 16 bit as well, where some of it is in fp32."""
    model = hybrid.model_of(name, spec=SPECS[name], dtype=dtype)
    saving_kernels.install(monkeypatch, model)
    layer = language_model(model).decoder.layers[0]
    mixer = layer.self_attention if name == GDN else layer.mixer
    if name == GDN:
        monkeypatch.setattr(mixer.out_norm, "forward", saving_kernels.saving_input)
    tokens = np.random.default_rng(0).integers(0, 60, 1025)
    one = Pairs(tokens[:-1], tokens[1:], np.ones(1024, bool))
    count = SavedBytes(addresses(*mixer.parameters()))
    counts: list[int] = []

    def counted(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        with count.counting():
            found = stock(hidden, *args, **kwargs)
        counts.append(count.now - hidden.nbytes)  # that is counted with the norm in front
        return found

    install(model)
    stock = mixer.forward
    monkeypatch.setattr(mixer, "forward", counted)
    step(model, [steps.microbatch([one], 0, 0)])
    shape = resolve(name, **SPECS[name]).recurrent
    assert shape is not None and len(counts) == 1
    assert shape.saved(dtype.itemsize, True) * 1024 == pytest.approx(counts[0], rel=0.02)
