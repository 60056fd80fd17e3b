"""The verdict on an update: it must be able to fail."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_prefix.numerics import tolerance
from megatron_prefix.rl.compare import Difference, Outcome, Scales, compare

NUM_TOKENS = 1000
LR, EPS = 1e-3, 1e-8


def an_outcome(dtype: torch.dtype = torch.float32, size: float = 1e-2) -> Outcome:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(6, 5, generator=generator).to(dtype) for _ in range(4)]
    return Outcome(
        losses=torch.randn(3, generator=generator).double(),
        gradients={"a": size * values[0], "b": 10 * size * values[1]},
        parameters={"a": values[2], "b": values[3]},
    )


def judge(expected: Outcome, found: Outcome) -> Difference:
    scales = Scales(loss=2.0, gradient=0.8, cancellation=1.0)
    return compare(expected, found, num_tokens=NUM_TOKENS, scales=scales, lr=LR, eps=EPS)


def shifted(values: dict[str, Tensor], name: str, error: float) -> dict[str, Tensor]:
    """`values` with one element of one tensor moved by `error` of the tensor's largest."""
    moved = {n: v.clone() for n, v in values.items()}
    moved[name].view(-1)[7] += error * values[name].abs().max()
    return moved


def test_equal_outcomes_pass() -> None:
    found = judge(an_outcome(), an_outcome())
    assert found.passed is True and not found.failures
    assert found.loss_max_abs_diff == found.grad_max_rel_diff == found.param_max_abs_diff == 0
    assert found.tolerance == tolerance(torch.float32, NUM_TOKENS)


@pytest.mark.parametrize(("factor", "passes"), [(0.5, True), (2.0, False)])
@pytest.mark.parametrize("name", ["a", "b"])
def test_gradients_are_judged_each_by_its_own_size(factor: float, passes: bool, name: str) -> None:
    expected = an_outcome(torch.float64)
    error = factor * tolerance(torch.float64, NUM_TOKENS)
    found = replace(expected, gradients=shifted(expected.gradients, name, error))
    verdict = judge(expected, found)
    assert verdict.passed is passes
    assert verdict.grad_max_rel_diff == pytest.approx(error, rel=0.2)
    assert passes or verdict.failures[0].startswith(f"gradient of {name}: ")


@pytest.mark.parametrize(("factor", "passes"), [(0.5, True), (2.0, False)])
def test_losses_are_judged_by_their_terms(factor: float, passes: bool) -> None:
    expected = an_outcome()
    error = factor * 2.0 * tolerance(torch.float32, NUM_TOKENS)
    found = replace(expected, losses=expected.losses + torch.tensor([0, error, 0]))
    verdict = judge(expected, found)
    assert verdict.passed is passes and bool(verdict.failures) is not passes


def test_a_parameter_never_moves_further_than_two_steps() -> None:
    expected = an_outcome()
    for distance, passes in ((1.9 * LR, True), (2.5 * LR, False)):
        parameters = {n: v.clone() for n, v in expected.parameters.items()}
        parameters["b"][2, 2] += distance
        assert judge(expected, replace(expected, parameters=parameters)).passed is passes


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["losses", "gradients", "parameters"])
def test_not_a_number_fails(bad: float, where: str) -> None:
    expected = an_outcome()
    found = an_outcome()
    value = getattr(found, where)
    (value if where == "losses" else value["a"]).view(-1)[0] = bad
    assert judge(expected, found).passed is False
    assert judge(found, expected).passed is False


def test_where_all_terms_cancel_errors_are_relative_to_the_terms() -> None:
    noise = an_outcome(size=1e-10)
    other = replace(noise, gradients={n: -v for n, v in noise.gradients.items()})
    assert judge(noise, other).passed is True
    large = {n: v + 1e-3 for n, v in noise.gradients.items()}
    assert judge(noise, replace(noise, gradients=large)).passed is False


def test_a_gradient_where_there_should_be_none_fails() -> None:
    expected = an_outcome(size=0.0)
    scales = Scales(loss=1.0, gradient=0.0, cancellation=1.0)
    found = replace(expected, gradients=an_outcome(size=1e-12).gradients)
    keywords = {"num_tokens": NUM_TOKENS, "scales": scales, "lr": LR, "eps": EPS}
    assert compare(expected, expected, **keywords).passed is True
    assert compare(expected, found, **keywords).passed is False


def test_sixteen_bits_are_not_judged() -> None:
    verdict = judge(an_outcome(torch.bfloat16), an_outcome(torch.bfloat16, size=2e-2))
    assert verdict.passed is None and verdict.grad_max_rel_diff > 0.5 and not verdict.failures
