"""What other tests compare with: each helper must refuse a wrong result."""

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


def by_policy(found):
    steps.assert_gradients(found[1], gradients(), 100)


def bit_by_bit(found):
    steps.assert_bitwise(found, (logs(), gradients()))


def same_state(found):
    training.assert_same(found[1], gradients())


def changed(change, name=NAME):
    found = gradients()
    found[name] = change(found[name])
    return logs(), found


def cut():
    found = gradients()
    del found["other"]
    return logs(), found


def worse_loss():
    found = logs()
    found[-1]["loss"] += 1e-6
    return found, gradients()


JUDGES = [by_policy, bit_by_bit, same_state]


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize("name", [NAME, "other"])
@pytest.mark.parametrize("factor", [1 + 1e-6, 0.0, math.nan])
def test_a_wrong_gradient_is_refused(judge, name, factor):
    with pytest.raises(AssertionError):
        judge(changed(lambda gradient: factor * gradient, name))


@pytest.mark.parametrize("judge", JUDGES)
def test_a_missing_gradient_is_refused(judge):
    with pytest.raises(AssertionError):
        judge(cut())


def test_a_wrong_loss_is_refused():
    with pytest.raises(AssertionError):
        bit_by_bit(worse_loss())
