"""Mode "auto" measures steps, learns from them, and keeps what it has learned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_prefix.errors import UserError
from megatron_prefix.plan.cost_file import read_costs
from megatron_prefix.run import cost_meter
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import one_group, steps
from tests.harness.one_group import run, schedule_with
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import Contract


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def meter_of(schedule: PrefixSchedule) -> cost_meter.CostMeter:
    (meter,) = schedule.planning.meters.values()
    return meter


def ran(schedule: PrefixSchedule, model: Any, num: int) -> list[tuple[bool, bool]]:
    """Per step whether it was shared and whether it was measured."""
    found = []
    for _ in range(num):
        run(schedule, model)
        assert schedule.report is not None
        found.append((schedule.report.decision.share, meter_of(schedule).due))
    return found


def test_the_first_steps_are_measured_and_one_in_fifty(monkeypatch) -> None:
    monkeypatch.setattr(cost_meter, "EVERY", 7)
    model, schedule = small_model(), schedule_with(mode="auto", min_speedup=0.01)
    found = ran(schedule, model, 8)
    assert [due for _, due in found] == [False, True, True, True, True, False, True, False]
    assert all(share for share, _ in found)
    meter = meter_of(schedule)
    guess, times = meter._prior, meter.times
    assert times.prices != guess.prices
    report = schedule.report
    assert report is not None and report.stopwatch is None and report.prediction is not None
    # Steps of one shape: the fit says what they took, whatever the machine.
    measured = [step for step in meter._measured.steps if step.share]
    assert len(measured) == 5
    ratios = [step.seconds / report.prediction.prefix_seconds for step in measured]
    assert math.isclose(sorted(ratios)[2], 1.0, rel_tol=0.5)


def test_other_modes_and_passes_without_grad_are_not_measured() -> None:
    model = small_model()
    for mode, forward_only in (("auto", True), ("on", False), ("observe", False)):
        schedule = schedule_with(mode=mode, min_speedup=0.01)
        for _ in range(3):
            steps.call(
                schedule, Contract().step, model, one_group.items(), forward_only=forward_only
            )
            assert not meter_of(schedule).due
        assert meter_of(schedule).times == meter_of(schedule)._prior


def test_a_close_prediction_times_both_schedules() -> None:
    """Whatever the machine: the limit is set to what the first step was predicted."""
    model, schedule = small_model(), schedule_with(mode="auto", min_speedup=0.01)
    run(schedule, model)
    assert schedule.report is not None
    speedup = schedule.report.decision.predicted_speedup
    schedule = schedule_with(mode="auto", min_speedup=0.8 * speedup)
    run(schedule, model)
    meter = meter_of(schedule)
    meter._measured = meter._measured.and_also(_shared_step(schedule))  # it was timed before
    found = ran(schedule, model, 2)
    assert [share for share, _ in found] == [False, False], "the first run warms up"
    assert meter._knows_both and meter.times.stock_factor != meter.times.prefix_factor


def _shared_step(schedule: PrefixSchedule) -> Any:
    assert schedule.report is not None and schedule.report.prediction is not None
    predicted = schedule.report.prediction
    work = tuple(predicted.prefix_features.tolist())
    step = cost_meter.StepTime(True, work, predicted.prefix_seconds)
    return cost_meter.Evidence(steps=(step,))


def test_auto_learns_that_sharing_is_slow() -> None:
    """Steps that were measured to take a hundred times as long are not shared any more."""
    model, schedule = small_model(), schedule_with(mode="auto", min_speedup=0.5)
    assert ran(schedule, model, 2) == [(True, False), (True, True)]
    meter, report = meter_of(schedule), schedule.report
    assert report is not None and report.prediction is not None
    stock = cost_meter.StepTime(False, tuple(report.prediction.stock_features.tolist()), 1e-7)
    meter._measured = meter._measured.and_also(cost_meter.Evidence(steps=(stock,)))
    meter.times = meter._measured.times(meter._prior)
    assert ran(schedule, model, 1) == [(False, False)]
    assert report.fallback_count == 0 and schedule.report is not None
    assert schedule.report.fallback_count == 1


# The file -----------------------------------------------------------------------------------------


def test_the_next_run_begins_with_what_was_measured(tmp_path: Path) -> None:
    path = str(tmp_path / "costs.json")
    model = small_model()
    first = schedule_with(mode="auto", min_speedup=0.01, cost_file=path)
    ran(first, model, 3)
    second = schedule_with(mode="observe", cost_file=path)
    ran(second, model, 1)
    assert meter_of(second).times == meter_of(first).times
    other = schedule_with(mode="observe", cost_file=path)
    run(other, small_model(spec={"ffn_hidden_size": 256}))
    assert meter_of(other).times == meter_of(other)._prior
    (key,) = read_costs(path)
    assert "2 layers" in key and "cpu" in key and "kernel math" in key


def test_a_file_that_is_none_ends_the_step(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text("a letter", encoding="utf-8")
    with pytest.raises(UserError, match="no file of measured costs"):
        run(schedule_with(mode="auto", cost_file=str(path)), small_model())
    assert path.read_text(encoding="utf-8") == "a letter"
