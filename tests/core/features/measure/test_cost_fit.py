"""Prices from measurements: known ones come back, and strange ones do no harm."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from megatron_prefix.features.measure.cost_fit import Evidence, StepTime, together
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.cost import CostModel, Features, Work, features

COST = cost_of(resolve("qwen3-8b", num_layers=12))
PRIOR = COST.in_seconds(4e14, 12)
# Slower than the guess, with a dearer backward, slow attention and high overheads.
FACTORS = (1.5, 1.2, 4, 3, 2, 1, 1.8, 1.3, 3, 5, 2, 1)
TRUTH = CostModel(tuple(c * f for c, f in zip(PRIOR.prices, FACTORS, strict=True)))


def actions(seed: int, num: int = 60) -> list[Features]:
    """Segments of many sizes: inner ones without loss, and waves below them."""
    draw, found = np.random.default_rng(seed), []
    for _ in range(num):
        positions, start = draw.integers(50, 9000), draw.choice([0, 500, 10_000])
        inner = draw.random() < 0.3
        pairs = positions * (start + positions / draw.integers(2, 20))
        work = Work(positions, 0 if inner else positions, pairs, 1, 1 + (start > 0))
        found += [features(work, "F"), features(work, "B")]
    return found


def measured(rows: list[Features], noise: float = 0.0, seed: int = 0) -> list[float]:
    factors = np.exp(noise * np.random.default_rng(seed).standard_normal(len(rows)))
    return [TRUTH.of(one) * f for one, f in zip(rows, factors, strict=True)]


def error(times: CostModel, rows: list[Features]) -> float:
    return max(abs(times.of(one) / TRUTH.of(one) - 1) for one in rows)


def assert_known(times: CostModel) -> None:
    """Attention calls are a hundredth of the time here, and mostly come with an action."""
    for place, (found, true) in enumerate(zip(times.prices, TRUTH.prices, strict=True)):
        assert found == pytest.approx(true, rel=0.2 if place in (4, 10) else 0.03), place
    assert error(times, actions(1)) < 0.01


def test_known_prices_come_back() -> None:
    rows = actions(0)
    times = Evidence.of_actions(rows, measured(rows), PRIOR).times(PRIOR)
    assert_known(times)


def test_noise_and_first_calls_of_kernels() -> None:
    """5% of noise, and every tenth action a second late: others are predicted to some percent."""
    rows = actions(0)
    seconds = measured(rows, 0.05)
    seconds = [t + 1.0 * (number % 10 == 3) for number, t in enumerate(seconds)]
    times = Evidence.of_actions(rows, seconds, PRIOR).times(PRIOR)
    fresh = actions(1)
    total = sum(map(times.of, fresh)) / sum(map(TRUTH.of, fresh))
    assert total == pytest.approx(1, abs=0.04)
    assert np.median([abs(times.of(r) / TRUTH.of(r) - 1) for r in fresh]) < 0.06


def test_actions_of_one_size_move_all_prices_together() -> None:
    """Features in one proportion say one thing: a factor for all."""
    work = Work(2048, 2048, 2048 * 1025, 1, 1)
    rows = [features(work, kinds) for kinds in "FB" * 20]
    times = Evidence.of_actions(rows, [3 * PRIOR.of(one) for one in rows], PRIOR).times(PRIOR)
    assert times.prices == pytest.approx([3 * c for c in PRIOR.prices], rel=1e-6)


def test_no_price_is_negative() -> None:
    rows = actions(0)
    draw = np.random.default_rng(3)
    seconds = draw.uniform(0.001, 0.1, len(rows)).tolist()  # says nothing
    times = Evidence.of_actions(rows, seconds, PRIOR).times(PRIOR)
    assert min(times.prices) >= 0 and np.isfinite(times.prices).all()


def test_a_price_that_is_not_counted_stays_zero() -> None:
    prior = replace(PRIOR, prices=tuple(np.array(PRIOR.prices) * ([1, 0, 1, 1, 1, 1] * 2)))
    rows = actions(0)
    times = Evidence.of_actions(rows, measured(rows), prior).times(prior)
    assert times.prices[1] == times.prices[7] == 0


@pytest.mark.parametrize("num", [0, 3])
def test_few_actions_change_nothing(num) -> None:
    rows = actions(0)[:num]
    assert Evidence.of_actions(rows, measured(rows), PRIOR).times(PRIOR) == PRIOR


def test_ranks_and_steps_add_up() -> None:
    """The output layer is on the last stage only, and both stages' actions make one fit."""
    rows = actions(0)
    first = [one * (1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1) for one in rows]
    parts = [Evidence.of_actions(part, measured(part), PRIOR) for part in (first, rows)]
    times = together(parts, PRIOR).times(PRIOR)
    assert_known(times)
    later = together(parts, PRIOR).and_also(parts[1], 0.5)
    assert later.count == pytest.approx(0.5 * 240 + 120)
    assert_known(later.times(PRIOR))


# Whole steps --------------------------------------------------------------------------------------


def step(share: bool, factor: float) -> Evidence:
    one = features(Work(8000, 8000, 1e7, 2, 2), "FB")
    return Evidence(steps=(StepTime(share, tuple(one.tolist()), factor * PRIOR.of(one)),))


def factors(known: Evidence) -> tuple[float, float]:
    """Of the stock schedule and of the prefix schedule."""
    times = known.times(PRIOR)
    return times.stock_factor, times.prefix_factor


def test_factors_of_both_schedules() -> None:
    known = step(True, 2.0)
    assert factors(known) == pytest.approx((2, 2))
    for factor in (5.0, 1.5, 1.4):  # the median: one slow step does not count
        known = known.and_also(step(False, factor))
    assert factors(known) == pytest.approx((1.5, 2))
    assert known.measured(True) and known.measured(False) and not step(True, 1).measured(False)


def test_old_steps_are_forgotten() -> None:
    known = step(False, 9.0)
    for _ in range(20):
        known = known.and_also(step(True, 1.0))
    assert len(known.steps) == 6
    assert factors(known)[0] == pytest.approx(9)


def test_the_rank_for_which_nobody_waited_counts() -> None:
    found = together([step(True, 3.0), step(True, 1.1), step(False, 2.0), Evidence()], PRIOR)
    assert factors(found) == pytest.approx((2.0, 1.1))


# Kept ---------------------------------------------------------------------------------------------


def test_measurements_come_back_from_json() -> None:
    rows = actions(0)
    known = Evidence.of_actions(rows, measured(rows), PRIOR).and_also(step(True, 2.0))
    again = Evidence.from_json(json.loads(json.dumps(known.to_json(), allow_nan=False)))
    assert again.times(PRIOR) == known.times(PRIOR)
    assert again.steps == known.steps and again.count == known.count


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gram", [[1.0]]),
        ("gram", "x"),
        ("moment", [float("nan")] * 10),
        ("moment", [-1.0] * 10),
        ("count", None),
        ("count", float("inf")),
        ("steps", [[True, [1.0], 1.0]]),
        ("steps", [[True, [0.0] * 10, 1.0]]),
        ("steps", [[True, [1.0] * 10, 0.0]]),
        ("steps", 7),
        ("gram", np.triu(np.ones((10, 10)), 1).tolist()),
    ],
)
def test_damaged_measurements_are_refused(name, value) -> None:
    with pytest.raises(ValueError, match="measure"):
        Evidence.from_json({**step(True, 1.0).to_json(), name: value})
    with pytest.raises(ValueError, match="measure"):
        Evidence.from_json([])
