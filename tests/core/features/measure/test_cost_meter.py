"""Mode "auto" measures steps, learns from them, and keeps what it has learned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.features.graphs import choice
from megatron_prefix.features.measure import cost_meter, outlines
from megatron_prefix.features.measure.around import Measure
from megatron_prefix.features.measure.cost_file import Measured, read_costs, write_costs
from megatron_prefix.features.watch.around import WATCHED
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.rl.report_numbers import stopwatch_of
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.plan.gate import decide
from megatron_prefix.run import costs, step_reader
from megatron_prefix.run.read.suspend import Capture
from megatron_prefix.run.report import StepReport
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import one_group, steps
from tests.harness.one_group import assert_bitwise, run, schedule_with
from tests.harness.one_rank import one_rank, small_model
from tests.harness.recorded import choice_of
from tests.harness.steps import Contract


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def around_of(schedule: PrefixSchedule) -> Measure:
    (feature,) = [one for one in schedule.features if isinstance(one, Measure)]
    return feature


def meter_of(schedule: PrefixSchedule) -> cost_meter.CostMeter:
    (meter,) = around_of(schedule).meters.values()
    return meter


def costs_of(schedule: PrefixSchedule) -> costs.Costs:
    (of_model,) = schedule.requests.costs.values()
    return of_model


def measured(path: Path) -> cost_meter.Evidence:
    """What the one meter that writes this file has measured."""
    (entry,) = read_costs(str(path)).values()
    return entry.times


def remember(path: Path, *measured_steps: cost_meter.StepTime) -> None:
    """The next schedule with this file begins with these steps, and with nothing else."""
    (key,) = read_costs(str(path))
    path.unlink()
    write_costs(str(path), key, Measured(cost_meter.Evidence(steps=measured_steps)))


def ran(schedule: PrefixSchedule, model: Any, num: int) -> list[tuple[bool, bool]]:
    """Per step whether it was shared and whether it was measured."""
    found = []
    for _ in range(num):
        run(schedule, model)
        assert schedule.report is not None
        found.append((schedule.report.decision.share, meter_of(schedule).due))
    return found


def test_ranks_that_share_a_layer_count_once_in_the_guess() -> None:
    two = SimpleNamespace(size=lambda: 2)
    model = SimpleNamespace(cost=SimpleNamespace(in_seconds=lambda rate, *_: rate))
    rank: Any = SimpleNamespace(
        device=torch.device("cpu"), groups=SimpleNamespace(tp=two, cp=two), model=model,
        config=SimpleNamespace(num_layers=4), num_stages=1, models=[model],
    )  # fmt: skip
    assert costs.guessed(rank) == 4 * costs.FLOPS_PER_SECOND["cpu"]  # type: ignore[comparison-overlap]


def test_the_first_steps_are_measured_and_one_in_fifty(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cost_meter, "EVERY", 7)
    path = tmp_path / "costs.json"
    model = small_model()
    schedule = schedule_with(mode="auto", min_speedup=0.01, cost_file=str(path))
    found = ran(schedule, model, 1)
    guess = costs_of(schedule).times
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


def test_other_modes_and_passes_without_grad_are_not_measured() -> None:
    model = small_model()
    for mode, forward_only in (("auto", True), ("on", False), ("observe", False)):
        schedule, times = schedule_with(mode=mode, min_speedup=0.01), set()
        for _ in range(3):
            steps.call(
                schedule, Contract().step, model, one_group.items(), forward_only=forward_only
            )
            assert mode != "auto" or not meter_of(schedule).due
            times.add(costs_of(schedule).times)
        assert len(times) == 1


def test_first_steps_are_measured_for_graphs_of_known_costs(tmp_path: Path) -> None:
    """On the CPU, where the device waits for the host; layers cannot run on graphs there."""
    path = tmp_path / "costs.json"
    model = small_model()
    first = schedule_with(mode="auto", min_speedup=0.01, cost_file=str(path))
    ran(first, model, 2)
    both = first.report.prediction
    assert both is not None
    shapes = (True, both.prefix_features), (False, both.stock_features)
    remember(path, *(cost_meter.StepTime(one, tuple(of.tolist()), 1.0) for one, of in shapes))
    for graphs, due in (("auto", [False, True, True, True, True]), (0, [False] * 5)):
        schedule = schedule_with(
            mode="auto", min_speedup=1e-6, cost_file=str(path), graph_tokens=graphs
        )
        assert [one for _, one in ran(schedule, model, 5)] == due
        assert (choice_of(schedule).tokens > 0) == (graphs == "auto")


@pytest.mark.parametrize(("pays", "num"), [(1e9, 5), (0.0, 4)])
def test_a_step_with_graphs_that_go_says_nothing_of_others(
    pays: float, num: int, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cost_meter, "EVERY", 7)
    monkeypatch.setattr(choice, "PAYS", pays)
    path = tmp_path / "costs.json"
    schedule = schedule_with(
        mode="auto", min_speedup=0.01, graph_tokens="auto", cost_file=str(path)
    )
    ran(schedule, small_model(), 7)
    assert (choice_of(schedule).tokens > 0) == (num == 5)
    assert len(measured(path).steps) == num


@pytest.mark.parametrize("why", ["over_limit", "retried"])
def test_graphs_that_leave_no_room_end(why: str, monkeypatch) -> None:
    monkeypatch.setattr(cost_meter, "EVERY", 7)
    schedule = schedule_with(mode="auto", min_speedup=0.01, graph_tokens="auto")
    model, memory = small_model(), schedule.memory
    ran(schedule, model, 6)
    assert choice_of(schedule).tokens > 0
    run, limited = memory.run, memory.limited

    def run_again(*args: Any, **options: Any) -> Any:
        result, plan = run(*args, **options)
        return result, replace(plan)

    if why == "retried":
        monkeypatch.setattr(memory, "run", run_again)
    else:

        def over_limit(*args: Any) -> Any:
            plan, memory.limit = limited(*args)[0], 0.0
            return plan, math.inf

        monkeypatch.setattr(memory, "limited", over_limit)
    found = ran(schedule, model, 1)
    assert found == [(why == "retried", True)]
    assert choice_of(schedule).tokens == 0 and not choice_of(schedule).is_open


def test_a_close_prediction_times_both_schedules(tmp_path: Path) -> None:
    """Whatever the machine: the limit is set to what the first step was predicted."""
    path = tmp_path / "costs.json"
    model = small_model()
    schedule = schedule_with(mode="auto", min_speedup=0.01, cost_file=str(path))
    ran(schedule, model, 2)
    first = schedule.report.prediction
    assert first is not None
    timed = cost_meter.StepTime(True, tuple(first.prefix_features.tolist()), first.prefix_seconds)
    remember(path, timed)
    speedup = schedule.report.decision.predicted_speedup
    schedule = schedule_with(mode="auto", min_speedup=0.8 * speedup, cost_file=str(path))
    found = ran(schedule, model, 3)
    assert [share for share, _ in found] == [True, False, False], "the first run warms up"
    assert {step.share for step in measured(path).steps} == {True, False}
    assert costs_of(schedule).times.stock_factor != costs_of(schedule).times.prefix_factor


def doubting(path: Path, model: Any) -> tuple[PrefixSchedule, StepReport]:
    """A schedule that has timed only itself, with a prediction near the least speedup, and the
    report of the step that it knows."""
    first = schedule_with(mode="auto", min_speedup=0.01, cost_file=str(path))
    ran(first, model, 2)
    report = first.report
    assert report is not None and report.prediction is not None
    both = report.prediction
    timed = cost_meter.StepTime(True, tuple(both.prefix_features.tolist()), both.prefix_seconds)
    remember(path, timed)
    speedup = report.decision.predicted_speedup
    return schedule_with(mode="auto", min_speedup=0.8 * speedup, cost_file=str(path)), report


def test_a_step_that_is_known_to_time_stock_is_not_read(monkeypatch, tmp_path: Path) -> None:
    """Of two steps that the stock schedule gets to be timed the second is known before."""
    path, model = tmp_path / "costs.json", small_model()
    schedule, report = doubting(path, model)
    reads, suspended = counted_looks(monkeypatch)
    assert [share for share, _ in ran(schedule, model, 2)] == [True, False]
    assert (reads.count, suspended.count) == (2, 2)
    found = run(schedule, model)
    assert (reads.count, suspended.count) == (2, 2), "it was read"
    assert "times the stock schedule" in schedule.report.decision.reason
    assert_bitwise(found, run(stock_schedule(), small_model()))
    # What was measured stands beside the work of exactly this step.
    (stock,) = [step for step in measured(path).steps if not step.share]
    assert stock.features == tuple(report.prediction.stock_features.tolist())
    ran(schedule, model, 1)
    assert reads.count == 3, "the next one is looked at again"


def test_a_timed_step_that_cannot_be_read_has_run_all_the_same(monkeypatch, tmp_path: Path) -> None:
    """Whatever is wrong with its calls, other stages wait to hear of it."""
    path, model = tmp_path / "costs.json", small_model()
    schedule, _ = doubting(path, model)
    ran(schedule, model, 2)
    monkeypatch.setattr(outlines, "layouts", lambda *_: [][0])
    found = run(schedule, model)
    assert "times the stock schedule" in schedule.report.decision.reason
    assert schedule.report.prediction is None
    assert_bitwise(found, run(stock_schedule(), small_model()))
    assert all(step.share for step in measured(path).steps)
    assert "forward" not in vars(unwrap(model))


def test_the_watched_step_is_the_first_run_of_stock(monkeypatch, tmp_path: Path) -> None:
    """So one step is enough to time it."""
    monkeypatch.setattr(cost_meter, "DOUBT", 1e9)
    path, model = tmp_path / "costs.json", small_model()
    config = PrefixConfig(
        mode="auto", min_gain=0, kernel="math", min_speedup=0.01, cost_file=str(path)
    )
    schedule, shares = PrefixSchedule(config, looks_first=True), ""
    for _ in range(5):
        run(schedule, model)
        shares += "-S"[schedule.report.decision.share]
        if schedule.report.decision.reason == WATCHED:
            shares = "w"
    assert shares == "wSS-S"
    assert {step.share for step in measured(path).steps} == {True, False}


def counted_looks(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """How often a step's calls are read, and how often its forward steps are suspended."""
    found = []
    for owner, name in ((step_reader, "read_calls"), (Capture, "run")):
        count, real = SimpleNamespace(count=0), getattr(owner, name)

        def counting(*args: Any, _real: Any = real, _count: Any = count, **kwargs: Any) -> Any:
            _count.count += 1
            return _real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)
        found.append(count)
    return found[0], found[1]


def test_auto_learns_that_sharing_is_slow(tmp_path: Path) -> None:
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
def test_a_close_prediction_times_the_other_schedule(speedup, turns) -> None:
    config = PrefixConfig(mode="auto")
    decision = decide(config, speedup)
    other = cost_meter.other_way(config, decision)
    assert (other.share != decision.share) == turns
    if turns:
        assert other.fallback == (not other.share)
        assert other.reason.endswith(f"times the {'prefix' if other.share else 'stock'} schedule")
    on = PrefixConfig(mode="on")
    assert cost_meter.other_way(on, decide(on, speedup)).share


# The file -----------------------------------------------------------------------------------------


def test_the_next_run_begins_with_what_was_measured(tmp_path: Path) -> None:
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


def test_a_file_that_is_none_ends_the_step(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text("a letter", encoding="utf-8")
    with pytest.raises(UserError, match="no file of measured costs"):
        run(schedule_with(mode="auto", cost_file=str(path)), small_model())
    assert path.read_text(encoding="utf-8") == "a letter"
