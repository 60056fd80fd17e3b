"""What other tests compare with: each helper must refuse a wrong result."""

import itertools
import math

import pytest
import torch

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
