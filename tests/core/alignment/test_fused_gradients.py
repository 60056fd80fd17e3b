"""Weight gradients that a kernel adds to main_grad itself, and several updates on one batch."""

import sys
from types import ModuleType

import pytest
import torch
from megatron.core.tensor_parallel import layers

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.megatron.stock import stock_schedule
from tests.harness import steps
from tests.harness.one_group import items
from tests.harness.one_rank import one_rank, small_model
from tests.harness.recorded import RecordedGraph, recorded_graphs  # noqa: F401

NAME = "fused_weight_gradient_mlp_cuda"


class Kernel(ModuleType):
    """What apex's kernel computes; it counts its calls."""

    calls = 0

    def wgrad_gemm_accum_fp32(self, inputs, gradient, main):
        self.calls += 1
        main.add_(gradient.t() @ inputs)


@pytest.fixture
def kernel(monkeypatch):
    made = Kernel(NAME)
    monkeypatch.setitem(sys.modules, NAME, made)
    monkeypatch.setattr(layers, NAME, made, raising=False)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    with one_rank():
        yield made


def updates(schedule, **options):
    """Gradients of three updates on the same microbatches."""
    overrides = {"gradient_accumulation_fusion": True}
    model = small_model(dtype=torch.float32, config_overrides=overrides, **options)
    data = [
        {name: value.float() if name in ("weight", "loss_mask") else value for name, value in one}
        for one in map(dict.items, items())
    ]
    found = []
    for _ in range(3):
        model.zero_grad_buffer()
        steps.call(schedule, steps.Contract().step, model, data)
        found.append({n: p.main_grad.clone() for n, p in model.named_parameters()})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.main_grad
    return found


@pytest.mark.parametrize(
    ("kept", "overlaps"),
    [({"memory": "retain"}, False), ({"memory": "recompute"}, True),
     ({"memory": "retain", "graph_tokens": 32}, True)],
)  # fmt: skip
def test_a_kernel_that_adds_to_main_grad(
    kernel,
    kept,
    overlaps,
    recorded_graphs,  # noqa: F811
):
    options = {"overlap_grad_reduce": overlaps, "bucket_size": 1}
    config = PrefixConfig(min_gain=0, kernel="math", segment_tokens=8, chunk_tokens=8, **kept)
    wanted = updates(stock_schedule(), **options)
    stock, kernel.calls = kernel.calls, 0
    found = updates(PrefixSchedule(config), **options)
    assert 0 < kernel.calls != stock > 0
    assert (recorded_graphs.replays > 0) is ("graph_tokens" in kept)
    tokens = sum(one["tokens"].numel() for one in items())
    for mine, its in zip(found, wanted, strict=True):
        steps.assert_gradients(mine, its, tokens)
