"""In 16 bit: errors pooled over draws, and what they accept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_prefix.numerics import DRAWS, ERROR_RATIO
from megatron_prefix.verify.verdict import Alignment, Errors, Trace, judge

SIZE = 2000


def noise(generator: torch.Generator, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(SIZE, generator=generator, dtype=torch.float64)


def trace(values: Tensor) -> Trace:
    return Trace(values, values, {"weight": values}, {"weight": values.bfloat16()}, {})


def judged(scales: list[float], bad: float = 1.0) -> Alignment:
    """A verdict over draws in which the prefix schedule's error is `scales` times stock's."""
    generator = torch.Generator().manual_seed(0)
    errors, verdict = Errors(), None
    for scale in scales:
        truth = noise(generator)
        stock = trace(truth + noise(generator, 0.01))
        ours = trace(truth + noise(generator, 0.01 * scale))
        ours.gradients["weight"] = ours.gradients["weight"] * bad
        errors.add(stock, ours, trace(truth))
        verdict = verdict or judge(stock, ours, 0.0, (1, 1, 1))
    assert verdict is not None
    return errors.judged(verdict)


def test_equal_errors_pass() -> None:
    verdict = judged([1.0] * DRAWS)
    assert verdict.passed and not verdict.failures and verdict.draws == DRAWS
    assert verdict.tolerance == ERROR_RATIO
    assert verdict.grad_error_ratio_max == pytest.approx(1.0, abs=0.05)
    assert verdict.grad_error_ratio_p50 == verdict.grad_error_ratio_max


@pytest.mark.parametrize("scales", [[1.3] * DRAWS, [1.0] * (DRAWS - 1) + [5.0]])
def test_larger_errors_fail_and_say_which(scales: list[float]) -> None:
    verdict = judged(scales)
    assert not verdict.passed and len(verdict.failures) == 3
    assert {line.partition(":")[0] for line in verdict.failures} == {
        "error ratio of gradient of weight", "error ratio of losses", "error ratio of log-probs",
    }  # fmt: skip


def test_a_wrong_gradient_fails_although_the_forward_is_right() -> None:
    verdict = judged([1.0] * DRAWS, bad=1.05)
    assert [line.partition(":")[0] for line in verdict.failures] == [
        "error ratio of gradient of weight"
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_fails(value: float) -> None:
    verdict = judged([1.0] * DRAWS, bad=value)
    assert not verdict.passed and verdict.grad_error_ratio_max == float("inf")


def test_failures_of_the_first_draw_are_kept() -> None:
    failed = replace(judged([1.0] * DRAWS), failures=("nothing was compared",), passed=False)
    errors = Errors()
    one = trace(torch.ones(4, dtype=torch.float64))
    errors.add(one, one, one)
    assert errors.judged(failed).failures == ("nothing was compared",)
    assert errors.judged(failed).grad_error_ratio_max == 1.0
