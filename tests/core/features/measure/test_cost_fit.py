"""Prices from measurements: known ones come back, and strange ones do no harm."""

import json
from dataclasses import replace

import numpy as np
import pytest

from megatron_prefix.errors import UserError
from megatron_prefix.features.measure.cost_file import Measured, read_costs, write_costs
from megatron_prefix.features.measure.cost_fit import Evidence, StepTime, together
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.cost import CostModel, Work, features

COST = cost_of(resolve("qwen3-8b", num_layers=12))
PRIOR = COST.in_seconds(4e14, 12)
# Slower than the guess, with a dearer backward, slow attention and high overheads.
FACTORS = (1.5, 1.2, 4, 3, 2, 1, 1.8, 1.3, 3, 5, 2, 1)
TRUTH = CostModel(tuple(c * f for c, f in zip(PRIOR.prices, FACTORS, strict=True)))


def actions(seed, num=60):
    """Segments of many sizes: inner ones without loss, and waves below them."""
    draw, found = np.random.default_rng(seed), []
    for _ in range(num):
        positions, start = draw.integers(50, 9000), draw.choice([0, 500, 10_000])
        inner = draw.random() < 0.3
        pairs = positions * (start + positions / draw.integers(2, 20))
        work = Work(positions, 0 if inner else positions, pairs, 1, 1 + (start > 0))
        found += [features(work, "F"), features(work, "B")]
    return found


def measured(rows, noise=0.0, seed=0):
    factors = np.exp(noise * np.random.default_rng(seed).standard_normal(len(rows)))
    return [TRUTH.of(one) * f for one, f in zip(rows, factors, strict=True)]


def error(times, rows):
    return max(abs(times.of(one) / TRUTH.of(one) - 1) for one in rows)


def assert_known(times):
    """Attention calls are a hundredth of the time here, and mostly come with an action."""
    for place, (found, true) in enumerate(zip(times.prices, TRUTH.prices, strict=True)):
        assert found == pytest.approx(true, rel=0.2 if place in (4, 10) else 0.03), place
    assert error(times, actions(1)) < 0.01


def test_known_prices_come_back():
    rows = actions(0)
    times = Evidence.of_actions(rows, measured(rows), PRIOR).times(PRIOR)
    assert_known(times)


def test_noise_and_first_calls_of_kernels():
    """5% of noise, and every tenth action a second late: others are predicted to some percent."""
    rows = actions(0)
    seconds = measured(rows, 0.05)
    seconds = [t + 1.0 * (number % 10 == 3) for number, t in enumerate(seconds)]
    times = Evidence.of_actions(rows, seconds, PRIOR).times(PRIOR)
    fresh = actions(1)
    total = sum(map(times.of, fresh)) / sum(map(TRUTH.of, fresh))
    assert total == pytest.approx(1, abs=0.04)
    assert np.median([abs(times.of(r) / TRUTH.of(r) - 1) for r in fresh]) < 0.06


def test_no_price_is_negative():
    rows, draw = actions(0), np.random.default_rng(3)
    seconds = draw.uniform(0.001, 0.1, len(rows)).tolist()  # says nothing
    times = Evidence.of_actions(rows, seconds, PRIOR).times(PRIOR)
    assert min(times.prices) >= 0 and np.isfinite(times.prices).all()


def test_ranks_and_steps_add_up():
    """The output layer is on the last stage only, and both stages' actions make one fit."""
    rows = actions(0)
    first = [one * (1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1) for one in rows]
    parts = [Evidence.of_actions(part, measured(part), PRIOR) for part in (first, rows)]
    times = together(parts, PRIOR).times(PRIOR)
    assert_known(times)
    later = together(parts, PRIOR).and_also(parts[1], 0.5)
    assert later.count == pytest.approx(0.5 * 240 + 120)
    assert_known(later.times(PRIOR))


def step(share, factor):
    one = features(Work(8000, 8000, 1e7, 2, 2), "FB")
    return Evidence(steps=(StepTime(share, tuple(one.tolist()), factor * PRIOR.of(one)),))


def factors(known):
    """Of the stock schedule and of the prefix schedule."""
    times = known.times(PRIOR)
    return times.stock_factor, times.prefix_factor


def test_factors_of_both_schedules():
    known = step(True, 2.0)
    assert factors(known) == pytest.approx((2, 2))
    for factor in (5.0, 1.5, 1.4):  # the median: one slow step does not count
        known = known.and_also(step(False, factor))
    assert factors(known) == pytest.approx((1.5, 2))
    assert known.measured(True) and known.measured(False) and not step(True, 1).measured(False)


@pytest.mark.parametrize(("name", "value"), [
    ("gram", [[1.0]]), ("gram", "x"), ("moment", [float("nan")] * 10), ("moment", [-1.0] * 10),
    ("count", None), ("count", float("inf")), ("steps", [[True, [1.0], 1.0]]),
    ("steps", [[True, [0.0] * 10, 1.0]]), ("steps", [[True, [1.0] * 10, 0.0]]), ("steps", 7),
    ("gram", np.triu(np.ones((10, 10)), 1).tolist()),
])  # fmt: skip
def test_damaged_measurements_are_refused(name, value):
    with pytest.raises(ValueError, match="measure"):
        Evidence.from_json({**step(True, 1.0).to_json(), name: value})
    with pytest.raises(ValueError, match="measure"):
        Evidence.from_json([])


# The file of measured costs: whole, shared by several jobs, and never another file's end ----------


def test_entries_live_side_by_side(tmp_path):
    path = str(tmp_path / "new" / "costs.json")
    assert read_costs(path) == {}
    for key, count in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        write_costs(path, key, Measured(replace(Evidence(), count=count)))
    assert {key: one.times.count for key, one in read_costs(path).items()} == {"a": 3.0, "b": 2.0}
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["costs.json"]


@pytest.mark.parametrize("row", [[True], [True, 0, "x"], [True, 0, -1.0], [1, 0, *[1.0] * 9], 3])
def test_damaged_bytes_are_refused(tmp_path, row):
    path = tmp_path / "costs.json"
    write_costs(str(path), "a", Measured())
    values = json.loads(path.read_text(encoding="utf-8"))
    values["measured"]["a"]["bytes"] = [row]
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(UserError, match="damaged"):
        read_costs(str(path))


@pytest.mark.parametrize(("text", "why"), [
    (b"rollouts", "no file of measured costs"), (b"\xff\xfe", "no file of measured costs"),
    (b"[]", "no file of measured costs"), (b"[" * 100_000, "no file of measured costs"),
    (b'{"format": "megatron_prefix costs", "version": 9}', "another version than 2"),
    (b'{"format": "megatron_prefix costs", "version": 2}', "damaged"),
    (b'{"format": "megatron_prefix costs", "version": 2, "measured": 1}', "damaged"),
    (b'{"format": "megatron_prefix costs", "version": 2, "measured": {"a": 1}}', "damaged"),
])  # fmt: skip
def test_other_files_are_refused_and_kept(tmp_path, text, why):
    path = tmp_path / "costs.json"
    path.write_bytes(text)
    for work in (lambda: read_costs(str(path)), lambda: write_costs(str(path), "a", Measured())):
        with pytest.raises(UserError, match=why) as caught:
            work()
        assert "\n" not in str(caught.value) and "name another file" in str(caught.value)
    assert path.read_bytes() == text
