"""The policy itself: what it accepts, and that it can fail."""

from __future__ import annotations

import pytest
import torch

from megatron_prefix.lab.numerics import (
    DRAWS,
    ERROR_RATIO,
    accumulator_dtype,
    assert_close,
    error_ratio,
    relative_error,
    tolerance,
)


def test_tolerance_follows_dtype_and_length() -> None:
    order = [
        tolerance(dtype, 1000)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    ]
    assert order == sorted(order)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert torch.finfo(dtype).eps < tolerance(dtype, 1) < tolerance(dtype, 10_000) < 0.05


def test_a_rounded_long_sum_fits_and_a_wrong_term_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.randn(64, 4096, generator=generator, dtype=torch.float64).to(dtype)
        wide = accumulator_dtype(dtype)
        total = x.to(wide).cumsum(-1)[:, -1].to(dtype)
        wanted = x.double().sum(-1)
        assert_close(total, wanted, 4096)
        with pytest.raises(AssertionError, match="relative error"):
            assert_close(total * 1.1, wanted, 4096)


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.17])
def test_chance_stays_below_the_ratio_and_twice_the_error_not(spread: float) -> None:
    generator = torch.Generator().manual_seed(0)
    draws = (1.02 * torch.exp(spread * torch.randn(500, DRAWS, generator=generator))).tolist()
    outside = [sum(ratios) / DRAWS > error_ratio(ratios) for ratios in draws]
    assert sum(outside) <= 0.02 * len(draws)
    twice = [2 * sum(ratios) / DRAWS > error_ratio([2 * r for r in ratios]) for ratios in draws]
    assert sum(twice) >= 0.97 * len(draws)


def test_a_draw_that_is_far_off_does_not_widen_its_own_limit() -> None:
    calm = [1.01, 0.99, 1.02, 0.98, 1.0, 1.03, 1.01]
    assert error_ratio([*calm, 1.0]) == pytest.approx(error_ratio([*calm, 50.0]), rel=0.03)
    assert error_ratio([*calm, float("inf")]) == error_ratio([1.0] * DRAWS) == ERROR_RATIO


def test_relative_error_is_relative_to_the_largest_element() -> None:
    expected = torch.tensor([1e-9, -4.0])
    assert relative_error(torch.tensor([1.0, -4.0]), expected) == pytest.approx(0.25)
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0.0


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        ([1.0, float("nan")], [1.0, 2.0], "1 of 2 elements of actual"),
        ([1.0, 2.0], [1.0, float("inf")], "1 of 2 elements of expected"),
        ([1.0, 2.0], [1.0], "shapes differ"),
        ([], [], "nothing to compare"),
        ([1e-30], [0.0], "all zero"),
    ],
)
def test_what_cannot_be_compared_is_an_error(
    actual: list[float], expected: list[float], message: str
) -> None:
    pair = torch.tensor(actual, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        relative_error(*pair)
    with pytest.raises(AssertionError, match=message):
        assert_close(*pair, 1)


def test_no_policy_for_integers_or_empty_sums() -> None:
    with pytest.raises(ValueError, match=r"torch\.int32"):
        tolerance(torch.int32, 1)
    with pytest.raises(ValueError, match="is 0"):
        tolerance(torch.float32, 0)
