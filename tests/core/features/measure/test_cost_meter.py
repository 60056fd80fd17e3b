"""Mode "auto" measures steps, learns from them, and keeps what it has learned."""

import math

import pytest

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.measure import cost_meter
from megatron_prefix.features.measure.around import Measure
from megatron_prefix.features.measure.cost_file import Measured, read_costs, write_costs
from megatron_prefix.lab.rl.report_numbers import stopwatch_of
from megatron_prefix.plan.gate import decide
from tests.harness.one_group import run, schedule_with
from tests.harness.one_rank import small_model

pytestmark = pytest.mark.usefixtures("on_one_rank")


def around_of(schedule):
    (feature,) = [one for one in schedule.features if isinstance(one, Measure)]
    return feature


def meter_of(schedule):
    (meter,) = around_of(schedule).meters.values()
    return meter


def costs_of(schedule):
    (of_model,) = schedule.requests.costs.values()
    return of_model


def measured(path):
    """What the one meter that writes this file has measured."""
    (entry,) = read_costs(str(path)).values()
    return entry.times


def remember(path, *measured_steps):
    """The next schedule with this file begins with these steps, and with nothing else."""
    (key,) = read_costs(str(path))
    path.unlink()
    write_costs(str(path), key, Measured(cost_meter.Evidence(steps=measured_steps)))


def ran(schedule, model, num):
    """Per step whether it was shared and whether it was measured."""
    found = []
    for _ in range(num):
        run(schedule, model)
        found.append((schedule.report.decision.share, meter_of(schedule).due))
    return found


def test_the_first_steps_are_measured_and_one_in_fifty(monkeypatch, tmp_path):
    monkeypatch.setattr(cost_meter, "EVERY", 7)
    path = tmp_path / "costs.json"
    model = small_model()
    schedule = schedule_with(mode="auto", min_speedup=0.01, cost_file=str(path))
    found, guess = ran(schedule, model, 1), costs_of(schedule).times
    found += ran(schedule, model, 7)
    assert [due for _, due in found] == [False, True, True, True, True, False, True, False]
    assert all(share for share, _ in found)
    assert costs_of(schedule).times.prices != guess.prices
    report = schedule.report
    assert report is not None and stopwatch_of(report) is None and report.prediction is not None
    # Steps of one shape: the fit says what they took, whatever the machine.
    shared = [step for step in measured(path).steps if step.share]
    assert len(shared) == 5
    ratios = [step.seconds / report.prediction.prefix_seconds for step in shared]
    assert math.isclose(sorted(ratios)[2], 1.0, rel_tol=0.5)


def test_auto_learns_that_sharing_is_slow(tmp_path):
    """Steps that were measured to take a hundred times as long are not shared any more."""
    path = tmp_path / "costs.json"
    model = small_model()
    schedule = schedule_with(mode="auto", min_speedup=0.5, cost_file=str(path))
    assert ran(schedule, model, 3) == [(True, False), (True, True), (True, True)]
    predicted = schedule.report.prediction
    assert schedule.report.fallback_count == 0 and predicted is not None
    stock = cost_meter.StepTime(False, tuple(predicted.stock_features.tolist()), 1e-7)
    remember(path, *measured(path).steps, stock)
    schedule = schedule_with(mode="auto", min_speedup=0.5, cost_file=str(path))
    assert ran(schedule, model, 1) == [(False, False)]
    assert schedule.report.fallback_count == 1


@pytest.mark.parametrize(
    ("speedup", "turns"), [(1.0, True), (1.5, True), (1.7, False), (0.6, False)]
)
def test_a_close_prediction_times_the_other_schedule(speedup, turns):
    config = PrefixConfig(mode="auto")
    decision = decide(config, speedup)
    other = cost_meter.other_way(config, decision)
    assert (other.share != decision.share) == turns
    if turns:
        assert other.fallback == (not other.share)
        assert other.reason.endswith(f"times the {'prefix' if other.share else 'stock'} schedule")
    on = PrefixConfig(mode="on")
    assert cost_meter.other_way(on, decide(on, speedup)).share


def test_the_next_run_begins_with_what_was_measured(tmp_path):
    path = str(tmp_path / "costs.json")
    model = small_model()
    first = schedule_with(mode="auto", min_speedup=0.01, cost_file=path)
    ran(first, model, 3)
    second = schedule_with(mode="observe", cost_file=path)
    ran(second, model, 1)
    assert costs_of(second).times == costs_of(first).times
    wider = small_model(spec={"ffn_hidden_size": 256})
    other, without = schedule_with(mode="observe", cost_file=path), schedule_with(mode="observe")
    for schedule in (other, without):
        run(schedule, wider)
    assert costs_of(other).times == costs_of(without).times
    (key,) = read_costs(path)
    assert "2 layers" in key and "cpu" in key and "kernel math" in key
