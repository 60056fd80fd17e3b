"""What other tests compare with, and the policy itself: each must refuse a wrong result."""

import itertools
import math

import pytest
import torch

from megatron_prefix.lab.numerics import accumulator_dtype, assert_close, relative_error
from tests.harness import steps, training

NAME = "decoder.layers.0.weight"


def gradients():
    draw = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(6, 5, generator=draw, dtype=torch.float64) for name in (NAME, "other")
    }


def logs():
    losses = torch.tensor([0.5, 1.5, 2.5], dtype=torch.float64)
    return [{"uid": uid, "loss": loss.clone(), "sum": loss} for uid, loss in enumerate(losses)]


JUDGES = {
    "by policy": lambda told, found: steps.assert_gradients(found, gradients(), 100),
    "bit by bit": lambda told, found: steps.assert_bitwise((told, found), (logs(), gradients())),
    "same state": lambda told, found: training.assert_same(found, gradients()),
}
WRONG = [*itertools.product((NAME, "other"), (1 + 1e-6, 0.0, math.nan, None))]
"""A gradient, and what it is multiplied by; None: it is missing."""


@pytest.mark.parametrize("judge", JUDGES.values(), ids=JUDGES.keys())
def test_a_right_result_passes(judge):
    judge(logs(), gradients())


@pytest.mark.parametrize("judge", JUDGES.values(), ids=JUDGES.keys())
@pytest.mark.parametrize(("name", "factor"), WRONG)
def test_a_wrong_gradient_is_refused(judge, name, factor):
    found = gradients()
    value = found.pop(name)
    if factor is not None:
        found[name] = factor * value
    with pytest.raises(AssertionError):
        judge(logs(), found)


def test_a_wrong_loss_is_refused():
    told = logs()
    told[-1]["loss"] += 1e-6
    with pytest.raises(AssertionError):
        JUDGES["bit by bit"](told, gradients())


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


@pytest.mark.parametrize(("actual", "expected", "message"), [
    ([1.0, float("nan")], [1.0, 2.0], "1 of 2 elements of actual"),
    ([1.0, 2.0], [1.0, float("inf")], "1 of 2 elements of expected"),
    ([1.0, 2.0], [1.0], "shapes differ"),
    ([], [], "nothing to compare"),
    ([1e-30], [0.0], "all zero"),
])  # fmt: skip
def test_what_cannot_be_compared_is_an_error(actual, expected, message):
    pair = torch.tensor(actual, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        relative_error(*pair)
    with pytest.raises(AssertionError, match=message):
        assert_close(*pair, 1)
