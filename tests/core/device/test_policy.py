"""The policy itself: what it accepts, and that it can fail."""

import pytest
import torch

from megatron_prefix.lab.numerics import accumulator_dtype, assert_close, relative_error


def test_a_rounded_long_sum_fits_and_a_wrong_term_does_not():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.randn(64, 4096, generator=generator, dtype=torch.float64).to(dtype)
        wide = accumulator_dtype(dtype)
        total = x.to(wide).cumsum(-1)[:, -1].to(dtype)
        wanted = x.double().sum(-1)
        assert_close(total, wanted, 4096)
        with pytest.raises(AssertionError, match="relative error"):
            assert_close(total * 1.1, wanted, 4096)


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
def test_what_cannot_be_compared_is_an_error(actual, expected, message):
    pair = torch.tensor(actual, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        relative_error(*pair)
    with pytest.raises(AssertionError, match=message):
        assert_close(*pair, 1)
