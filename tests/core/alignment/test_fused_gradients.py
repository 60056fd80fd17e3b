"""Weight gradients that a kernel adds to main_grad itself; layers frozen beside adapters."""

import sys
from types import ModuleType
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import layers

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.features.measure.cost_meter import key_of
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.plan.cost import NUM_FEATURES
from megatron_prefix.run.rank import Rank
from tests.harness import steps
from tests.harness.one_group import items, schedule_with
from tests.harness.one_rank import one_rank, small_model
from tests.harness.recorded import RecordedGraph, recorded_graphs  # noqa: F401
from tests.oracle.model import AROUND

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


def test_frozen_weights_cost_half_a_backward_and_get_no_gradient():
    """A frozen weight has no gradient: its backward is one product, and not two."""
    with one_rank(), AROUND["adapted"](mock.Mock()):
        model, ours = small_model(), schedule_with()
        steps.call(ours, steps.Contract().step, model, items())
        frozen = Rank.of([model]).frozen_share
        assert 0.8 < frozen < 1 and "of the weights frozen" in key_of(Rank.of([model]), "math")
    (costs,) = ours.requests.costs.values()
    forward, backward = costs.times.prices[0], costs.times.prices[NUM_FEATURES // 2]
    assert backward == pytest.approx((2 - frozen) * forward, rel=0.05)
    for name, parameter in unwrap(model).named_parameters():
        assert parameter.requires_grad == (".linear_in." in name or ".linear_out." in name)
        assert parameter.requires_grad or parameter.grad is None


def test_adapters_are_entered_where_layers_run_again():
    """The reference keeps everything: with all layers recomputed, and an input without gradient
    before them, Megatron's own backward does not enter them, and adapters get zeros."""
    found = []
    with one_rank(), AROUND["adapted"](mock.Mock()):
        for schedule, recompute in ((stock_schedule(), "none"), (schedule_with(), "full")):
            model = small_model(recompute=recompute)
            steps.run(schedule, steps.Contract().step, model, items())
            named = unwrap(model).named_parameters()
            found.append({name: one.main_grad for name, one in named if one.requires_grad})
        stock, own = found
        assert any(one.any() for one in stock.values())
        steps.assert_gradients(own, stock, 100)
