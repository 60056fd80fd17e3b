"""The judge of two schedules: it is tested by what it must refuse."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_prefix.lab.numerics import DRAWS, ERROR_RATIO, policy, tolerance
from megatron_prefix.lab.numerics.compare import Conditions, Trace, compare, merged, over_ranks
from megatron_prefix.lab.numerics.pooled import Errors

TOKENS, WIDTH, DEPTH, LR = 1000, 64, 4, 1e-3
KINDS = ("losses", "logprobs", "forward", "gradients", "parameters", "auxiliary")


def a_trace(dtype=torch.float64, size=1e-2):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return Trace(
        losses=draw(3),
        gradients={"a": (size * draw(6, 5)).to(dtype), "b": (10 * size * draw(6, 5)).to(dtype)},
        parameters={"a": draw(6, 5).to(dtype), "b": draw(6, 5).to(dtype)}, logprobs=draw(20),
        forward=draw(20), auxiliary={"balance": draw(4).float()},
    )  # fmt: skip


def conditions(dtype=torch.float64, **more):
    values = dict(tokens=TOKENS, width=WIDTH, depth=DEPTH, lr=LR, loss=2.0)
    return Conditions(dtype, **{**values, **more})


def judge(expected, found, **more):
    return compare(expected, found, conditions(expected.gradients["a"].dtype, **more))


def changed(trace, kind, change, name=""):
    value = getattr(trace, kind)
    if isinstance(value, dict):
        name = name or next(iter(value))
        return replace(trace, **{kind: {**value, name: change(value[name].clone())}})
    return replace(trace, **{kind: change(value.clone())})


def element(by):
    """Moves one element, by so much of the tensor's largest."""

    def change(value):
        largest = value.abs().max()
        value.view(-1)[-1] += by * largest
        return value

    return change


def test_equal_traces_pass():
    found = judge(a_trace(), a_trace())
    assert found.passed is True and not found.failures
    assert found.loss_max_abs_diff == found.grad_max_rel_diff == found.param_max_abs_diff == 0
    assert found.tolerance == tolerance(torch.float64, TOKENS, WIDTH, DEPTH)
    assert found.compared == {
        "losses": 3, "gradients": 2, "parameters": 2, "log-probs": 20,
        "log-probs without gradients": 20,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_difference_in_one_place_is_refused(kind, dtype):
    """Of each kind alone, a thousandth; in fp64 a millionth too."""
    expected = a_trace(dtype)
    sizes = (1e-3, 1e-6) if dtype is torch.float64 and kind != "auxiliary" else (3e-3,)
    for size in sizes:
        if kind == "parameters" and size < 1e-3:  # AdamW may go two steps either way
            continue
        verdict = judge(expected, changed(expected, kind, element(size)))
        assert verdict.passed is False and len(verdict.failures) == 1, size


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize(("factor", "passes"), [(0.9, True), (1.1, False)])
def test_gradients_are_judged_each_by_its_own_size(name, factor, passes):
    expected = a_trace()
    error = factor * conditions().limit
    verdict = judge(expected, changed(expected, "gradients", element(error), name))
    assert verdict.passed is passes
    assert verdict.grad_max_rel_diff == pytest.approx(error, rel=0.05)
    assert passes or verdict.failures[0].startswith(f"gradient of {name}: ")


@pytest.mark.parametrize(("factor", "passes"), [(0.9, True), (1.1, False)])
def test_losses_are_judged_by_their_terms(factor, passes):
    expected = replace(a_trace(torch.float32), logprobs=None)
    error = factor * 2.0 * conditions(torch.float32).limit
    found = replace(expected, losses=expected.losses + torch.tensor([0, error, 0]))
    verdict = judge(expected, found)
    assert verdict.passed is passes and bool(verdict.failures) is not passes
    assert (verdict.loss_max_abs_diff <= verdict.loss_limit) is passes


@pytest.mark.parametrize(("size", "distance", "passes"), [
    (1e9, 1.9 * LR, True), (1e9, 2.5 * LR, False), (1.0, 1e-12, True), (1.0, 1e-7, False),
])  # fmt: skip
def test_a_parameter_follows_its_gradient_two_steps_at_most(size, distance, passes):
    """Where a gradient may be off by no more than AdamW's eps allows, it stays where it is."""
    expected = a_trace()
    expected = replace(expected, gradients={n: size * g for n, g in expected.gradients.items()})
    verdict = judge(expected, changed(expected, "parameters", lambda value: value + distance))
    assert verdict.passed is passes
    assert size == 1 or verdict.param_limit == pytest.approx(2 * LR, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_not_a_number_is_refused(bad, kind):
    """In either trace, and in both; behind a number that is larger than all others."""

    def spoil(value):
        value.view(-1)[0], value.view(-1)[1] = 1e3, bad
        return value

    right, wrong = a_trace(), changed(a_trace(), kind, spoil)
    for expected, found in ((right, wrong), (wrong, right), (wrong, wrong)):
        assert judge(expected, found).passed is False


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_missing_is_refused(kind):
    whole = a_trace()
    value = getattr(whole, kind)
    fewer = value[:-1] if isinstance(value, Tensor) else dict(list(value.items())[:-1])
    cut = replace(whole, **{kind: fewer})
    assert judge(whole, cut).passed is False
    assert judge(cut, whole).passed is False
    if isinstance(value, Tensor):  # a single value would be compared with each
        assert judge(whole, replace(whole, **{kind: value[:1]})).passed is False


def test_gradients_that_are_all_zero_are_refused():
    """Nothing was compared; but a trainer's advantages may be."""
    expected = a_trace(size=0.0)
    assert judge(expected, expected).passed is False
    assert judge(expected, expected, may_vanish=True).passed is True
    found = replace(expected, gradients=a_trace(size=1e-12).gradients)
    assert judge(expected, found, may_vanish=True).passed is False


def test_a_comparatively_tiny_gradient_may_be_rounding():
    """Both ways; yet not larger than rounding errors of a hundredth of the largest."""
    limit = conditions().limit
    expected = a_trace()
    largest = float(expected.gradients["b"].abs().max())
    noise = changed(expected, "gradients", lambda g: 0.5 * limit * 1e-2 * largest * g.sign(), "a")
    opposite = changed(noise, "gradients", lambda g: -g, "a")
    none = changed(expected, "gradients", torch.zeros_like, "a")
    for first, second in ((noise, opposite), (noise, none), (none, noise)):
        assert judge(first, second).passed is True
    larger = changed(noise, "gradients", lambda g: 4 * g, "a")
    assert judge(noise, larger).passed is False
    assert judge(none, larger).passed is False


def test_a_small_gradient_must_be_right_all_the_same():
    """A millionth of the largest, times 1 + 1e-6."""
    small = changed(a_trace(), "gradients", lambda g: 1e-6 * g, "a")
    wrong = changed(small, "gradients", lambda g: (1 + 1e-6) * g, "a")
    assert judge(small, wrong).passed is False
    assert policy.FLOOR <= 0.01


def test_where_all_terms_cancel_errors_are_relative_to_the_terms():
    noise = a_trace(torch.float32, size=1e-10)
    other = replace(noise, gradients={n: -v for n, v in noise.gradients.items()})
    assert judge(noise, other, sent=0.8).passed is True
    large = {n: v + 1e-3 for n, v in noise.gradients.items()}
    assert judge(noise, replace(noise, gradients=large), sent=0.8).passed is False


def test_cancellation_widens_the_limit():
    expected = a_trace()
    found = changed(expected, "gradients", element(5 * conditions().limit))
    assert judge(expected, found).passed is False
    assert judge(expected, found, cancellation=10.0).passed is True


RIGHT = judge(a_trace(), a_trace())
WRONG = judge(a_trace(), changed(a_trace(), "gradients", element(1e-3)))


@pytest.mark.parametrize("rank", range(3))
def test_one_rank_that_fails_fails_all(rank):
    verdicts = [RIGHT, RIGHT, RIGHT]
    assert over_ranks(verdicts).passed is True
    verdicts[rank] = WRONG
    verdict = over_ranks(verdicts)
    assert verdict.passed is False and verdict.grad_max_rel_diff == WRONG.grad_max_rel_diff
    assert verdict.failures == tuple(f"rank {rank}: {line}" for line in WRONG.failures)
    assert over_ranks([WRONG]).failures == WRONG.failures


@pytest.mark.parametrize("place", range(2))
def test_a_nan_of_any_rank_stays(place):
    verdicts = [replace(RIGHT, loss_max_abs_diff=1.0), RIGHT]
    verdicts.insert(
        place, replace(RIGHT, loss_max_abs_diff=math.nan, grad_error_ratio_max=math.nan)
    )
    verdict = over_ranks(verdicts)
    assert not math.isfinite(verdict.loss_max_abs_diff)
    assert verdict.grad_error_ratio_max == math.inf


def test_every_difference_stands_beside_its_own_limit():
    """The largest difference may have passed where another's limit was smaller."""
    first = replace(RIGHT, grad_max_rel_diff=4.95e-5, tolerance=6e-5, loss_max_abs_diff=1e-6)
    second = replace(RIGHT, grad_max_rel_diff=1e-5, tolerance=4.14e-5, loss_max_abs_diff=3e-6)
    first, second = replace(first, loss_limit=2e-6), replace(second, loss_limit=4e-6)
    both = merged({"step 1": first, "step 2": second})
    assert (both.grad_max_rel_diff, both.tolerance) == (4.95e-5, 6e-5)
    assert (both.loss_max_abs_diff, both.loss_limit) == (3e-6, 4e-6)


@pytest.mark.parametrize("kind", ["losses", "logprobs", "forward", "parameters", "gradients"])
def test_what_no_rank_has_compared_is_refused(kind):
    """One stage of a pipeline has none of some; if no stage has any, nothing is compared."""
    value = getattr(a_trace(), kind)
    empty = replace(a_trace(), **{kind: value[:0] if isinstance(value, Tensor) else {}})
    without = compare(empty, empty, conditions(may_vanish=True))
    assert over_ranks([without, RIGHT]).passed is True
    verdict = over_ranks([without, without])
    assert verdict.passed is False and "were compared" in verdict.failures[0]


SIZE = 2000


def noise(generator, scale=1.0):
    return scale * torch.randn(SIZE, generator=generator, dtype=torch.float64)


def trace(values):
    return Trace(values, {"weight": values}, {"weight": values.bfloat16()}, logprobs=values)


def judged(scales, bad=1.0, bad_stock=1.0):
    """A verdict over draws in which the prefix schedule's error is `scales` times stock's."""
    generator = torch.Generator().manual_seed(0)
    errors, verdict = Errors(), None
    for scale in scales:
        truth = noise(generator)
        stock = trace(truth + noise(generator, 0.01))
        ours = trace(truth + noise(generator, 0.01 * scale))
        ours.gradients["weight"] = ours.gradients["weight"] * bad
        stock.gradients["weight"] = stock.gradients["weight"] * bad_stock
        errors.add(stock, ours, trace(truth))
        verdict = verdict or compare(stock, ours, conditions(torch.bfloat16))
    assert verdict is not None
    return errors.judged(verdict)


def test_sixteen_bits_alone_are_not_judged():
    expected, found = a_trace(torch.bfloat16), a_trace(torch.bfloat16, size=2e-2)
    verdict = judge(expected, found)
    assert verdict.passed is None and verdict.grad_max_rel_diff > 0.5 and not verdict.failures
    assert verdict.tolerance is None and over_ranks([verdict, verdict]).passed is None
    nothing = a_trace(torch.bfloat16, size=0.0)
    assert judge(nothing, nothing).passed is False


RATIOS = [f"error ratio of {name}" for name in ("gradient of weight", "losses", "log-probs")]


@pytest.mark.parametrize(("scales", "factors", "failed"), [
    ([1.0] * DRAWS, {}, []),
    ([1.3] * DRAWS, {}, RATIOS),
    ([1.0] * (DRAWS - 1) + [5.0], {}, RATIOS),
    ([1.0] * DRAWS, {"bad": 1.05}, RATIOS[:1]),  # although the forward is right
    # 5 % are five times the prefix schedule's error, which may be rounding; 30 % are not.
    ([1.0] * DRAWS, {"bad_stock": 1.05}, []),
    ([1.0] * DRAWS, {"bad_stock": 1.3}, ["gradient of weight"]),
])  # fmt: skip
def test_larger_errors_fail_and_say_which(scales, factors, failed):
    verdict = judged(scales, **factors)
    assert verdict.passed is (not failed) and verdict.draws == DRAWS
    assert {line.partition(":")[0] for line in verdict.failures} == {*failed}
    assert verdict.tolerance == ERROR_RATIO
    assert verdict.grad_error_ratio_p50 == verdict.grad_error_ratio_max
    if failed[:1] != RATIOS[:1]:
        assert verdict.grad_error_ratio_max < 1.1
    if not factors and not failed:
        assert verdict.grad_error_ratio_max == pytest.approx(1.0, abs=0.05)
    if failed == ["gradient of weight"]:
        assert "the stock schedule's is off by 30% of its norm" in verdict.failures[0]


@pytest.mark.parametrize(("scale", "least", "most"), [(1.0, 0, 0), (30.0, 95, 100)])
def test_a_loss_is_one_number_a_draw_and_chance_moves_it(scale, least, most):
    generator = np.random.default_rng(0)
    alarms = 0
    for _ in range(100):
        stock, ours = np.abs(generator.normal(size=(2, DRAWS))) * [[1.0], [scale]]
        ratio = np.linalg.norm(ours) / np.linalg.norm(stock)
        alarms += bool(ratio > policy.error_ratio([*(ours / stock)], size=1))
    assert least <= alarms <= most


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("wrong", [("stock",), ("prefix",), ("stock", "prefix")])
def test_what_is_not_finite_fails(value, wrong):
    bad, bad_stock = (value if who in wrong else 1.0 for who in ("prefix", "stock"))
    verdict = judged([1.0] * DRAWS, bad, bad_stock)
    assert not verdict.passed and verdict.grad_error_ratio_max == float("inf")
    schedules = " and the ".join(wrong)
    assert verdict.failures[-1] == (
        f"gradient of weight: NaN or infinite with the {schedules} schedule"
    )


@pytest.mark.parametrize(("bad", "passes"), [(1.0, True), (1.5, False), (math.nan, False)])
def test_experts_of_a_layer_are_judged_together(bad, passes):
    """In each draw another token goes to another expert than in fp32, once in each schedule."""
    generator = torch.Generator().manual_seed(0)
    errors, verdict, num = Errors(), None, 8
    name = "decoder.layers.{}.mlp.experts.{}.linear_fc1.weight"
    for draw in range(DRAWS):
        truth = {n: noise(generator) for n in range(num)}
        traces = []
        for schedule in range(2):
            found = {n: value + noise(generator, 0.01) for n, value in truth.items()}
            moved = (draw + 3 * schedule) % num  # an error of one expert, and of no other
            found[moved] = found[moved] + noise(generator, 0.2)
            if schedule:  # a wrong expert in one layer does not hide among the others
                found[2] = found[2] * bad
            traces.append(found)
        pair = [
            Trace(torch.zeros(1), {name.format(0, n): x for n, x in some.items()}, None)
            for some in (*traces, truth)
        ]
        errors.add(*pair)
        verdict = verdict or compare(pair[0], pair[1], conditions(torch.bfloat16))
    assert verdict is not None
    found = errors.judged(verdict)
    assert found.passed is passes
    if not passes:
        assert "decoder.layers.0.mlp.experts.*.linear_fc1.weight" in found.failures[-1]
