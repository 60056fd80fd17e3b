"""Which kernel a shape gets, and that a step's choices hold together."""

from __future__ import annotations

import pytest
import torch

from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.layers.blocks import adaptive
from megatron_prefix.layers.blocks.adaptive import AdaptiveKernel
from megatron_prefix.layers.blocks.interface import Runs
from megatron_prefix.layers.blocks.operators import MathKernel


class Named(MathKernel):
    """The exact kernel under another name, remembering its calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[str] = []

    def forward(self, *args):
        self.calls.append("forward")
        return super().forward(*args)

    def backward(self, *args):
        self.calls.append("backward")
        return super().backward(*args)


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
            kernel.forward(q, k, v, Runs.dense(8, 8), 0.5)
        assert len(runs_on.calls) == before + 3, f"step {step}"


def test_a_large_shape_is_planned_at_once(pair):
    planned, ready, kernel = pair
    kernel.begin_step()
    kernel.forward(rows(16), rows(8), rows(8), Runs.dense(16, 8), 0.5)
    assert planned.calls == ["forward"]
    assert ready.calls == []


def test_backward_stays_with_the_forwards_kernel(pair):
    planned, ready, kernel = pair
    q, k, v, dout = rows(8), rows(8), rows(8), rows(8)
    kernel.begin_step()
    runs = Runs.own((3, 5))
    part = kernel.forward(q, k, v, runs, 0.5)
    kernel.begin_step()  # by now the shape may have earned a plan
    got = kernel.backward(dout, q, k, v, *part, runs, 0.5)
    assert "backward" in ready.calls
    assert planned.calls == []
    exact = MathKernel()
    truth = exact.forward(q, k, v, runs, 0.5)
    wanted = exact.backward(dout, q, k, v, *truth, runs, 0.5)
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other, 8)


def test_every_distinct_length_of_a_wave_needs_its_own_plans(pair):
    planned, ready, kernel = pair
    kernel.begin_step()
    kernel.forward(rows(16), rows(16), rows(16), Runs.own((16,)), 0.5)  # 128 pairs, one plan
    assert planned.calls
    both = Runs.own((1, 16))  # about as many pairs, two plans
    kernel.forward(rows(17), rows(17), rows(17), both, 0.5)
    assert ready.calls


def test_many_unequal_runs_stay_one_call(pair, monkeypatch):
    """However often they return: a call each would cost more than the faster kernel saves."""
    planned, ready, kernel = pair
    monkeypatch.setattr(adaptive, "CALL_S", adaptive.PLAN_S)
    lengths = (3, 5, 4, 4)
    for runs in (Runs.own(lengths), Runs(lengths, (2, 6, 3, 5))):
        for _ in range(60):
            kernel.begin_step()
            kernel.forward(rows(16), rows(16), rows(16), runs, 0.5)
    assert len(ready.calls) == 120
    equal = Runs.own((4, 4, 4, 4))  # one call of one shape
    for _ in range(60):
        kernel.begin_step()
        kernel.forward(rows(16), rows(16), rows(16), equal, 0.5)
    assert planned.calls
