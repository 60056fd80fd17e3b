"""Which kernel a shape gets, and that a step's choices hold together."""

from __future__ import annotations

import pytest
import torch

from megatron_prefix.attention import adaptive
from megatron_prefix.attention.adaptive import AdaptiveKernel
from megatron_prefix.attention.operators import MathKernel
from megatron_prefix.numerics import assert_close


class Named(MathKernel):
    """The exact kernel under another name, remembering its calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[str] = []

    def forward(self, q, k, v, scale, causal):
        self.calls.append("forward")
        return super().forward(q, k, v, scale, causal)

    def backward(self, saved, aux, scale, causal):
        self.calls.append("backward")
        return super().backward(saved, aux, scale, causal)


@pytest.fixture
def pair(monkeypatch):
    """A planned and a ready kernel; a plan costs what a [8, 2] by [8] block saves in two steps."""
    flops = 3.5 * 4 * 64 * 2 * 4
    monkeypatch.setattr(adaptive, "FLASH_RATE", 1.0)
    monkeypatch.setattr(adaptive, "CUDNN_RATE", 2.0)
    monkeypatch.setattr(adaptive, "PLAN_S", flops * 0.5 * 3 * 2)
    planned, ready = Named("planned"), Named("ready")
    return planned, ready, AdaptiveKernel(planned, ready, num_layers=3)


def rows(num: int, heads: int = 2) -> torch.Tensor:
    return torch.randn(num, heads, 4, dtype=torch.float64)


def test_a_shape_earns_its_plan_between_steps(pair):
    planned, ready, kernel = pair
    q, k, v = rows(8), rows(8), rows(8)
    for step, runs_on in enumerate((ready, planned, planned)):
        before = len(runs_on.calls)
        kernel.begin_step()
        for _ in range(3):
            kernel.dense(q, k, v, 0.5)
        assert len(runs_on.calls) == before + 3, f"step {step}"


def test_a_large_shape_is_planned_at_once(pair):
    planned, ready, kernel = pair
    kernel.begin_step()
    kernel.dense(rows(16), rows(8), rows(8), 0.5)
    assert planned.calls == ["forward"]
    assert ready.calls == []


def test_backward_stays_with_the_forwards_kernel(pair):
    planned, ready, kernel = pair
    q, k, v, dout = rows(8), rows(8), rows(8), rows(8)
    kernel.begin_step()
    part = kernel.causal(q, k, v, 0.5, (3, 5))
    kernel.begin_step()  # by now the shape may have earned a plan
    got = kernel.causal_backward(dout, q, k, v, *part, 0.5, (3, 5))
    assert "backward" in ready.calls
    assert planned.calls == []
    exact = MathKernel()
    truth = exact.causal(q, k, v, 0.5, (3, 5))
    wanted = exact.causal_backward(dout, q, k, v, *truth, 0.5, (3, 5))
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other, 8)


def test_every_distinct_length_of_a_wave_needs_its_own_plans(pair):
    planned, ready, kernel = pair
    kernel.begin_step()
    kernel.causal(rows(16), rows(16), rows(16), 0.5, (16,))  # 128 pairs, one plan
    assert planned.calls
    kernel.causal(rows(17), rows(17), rows(17), 0.5, (1, 16))  # about as many pairs, two plans
    assert ready.calls
