"""Peaks of memory that a device's allocator has seen correct those that are predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.plan.peak_memory import Peaks, Seen, factors
from megatron_prefix.plan.prediction import limit_of
from megatron_prefix.run import cost_meter
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import steps
from tests.harness.one_rank import small_model
from tests.harness.ranks import run_ranks
from tests.harness.steps import Contract


def test_only_a_new_maximum_tells() -> None:
    before = Peaks(40.0, 100.0, 120.0)
    assert Seen.of_step(before, Peaks(40.0, 100.0, 120.0), 50.0) == Seen()
    assert Seen.of_step(before, Peaks(40.0, 140.0, 120.0), 50.0) == Seen(2.0, 0.0)
    assert Seen.of_step(before, Peaks(40.0, 140.0, 165.0), 50.0) == Seen(2.0, 2.5)
    assert Seen.of_step(before, Peaks(40.0, 140.0, 165.0), 0.0) == Seen()
    assert Seen(2.0, 2.5).then(Seen(0.0, 3.0)) == Seen(2.0, 3.0)
    assert Seen.most([Seen(2.0, 1.0), Seen(0.0, 3.0)]) == Seen(2.0, 3.0)


@pytest.mark.parametrize(
    ("stock", "ours", "wanted"),
    [
        (Seen(), Seen(), (1.0, 1.0)),
        (Seen(0.9, 1.0), Seen(), (0.9, 0.9)),  # what is wrong with both changes neither
        (Seen(), Seen(1.2, 1.3), (1.2, 1.2)),
        (Seen(0.9, 1.0), Seen(1.1, 1.1), (0.9, 1.1)),
        (Seen(0.9, 1.0), Seen(0.8, 1.5), (0.9, 1.35)),  # ours reserves half as much again
        (Seen(0.9, 1.0), Seen(1.0, 0.5), (0.9, 1.0)),
    ],
)
def test_factors_of_predictions(stock: Seen, ours: Seen, wanted: tuple[float, float]) -> None:
    assert factors(stock, ours) == pytest.approx(wanted)


def test_on_the_cpu_nothing_is_read() -> None:
    assert cost_meter.peaks(torch.device("cpu")) is None


def corrected(seen: dict[bool, tuple[float, ...]]) -> list[tuple[bool, float, float, float]]:
    """A rank's part of six steps, with an allocator that sees so much of the predictions, by
    schedule and rank: whether each shared, its limit and the factors after it."""
    runtime.initialize(Layout(dp=2))
    model, rank = small_model(dtype=torch.float64, layout=Layout(dp=2)), dist.get_rank()
    config = PrefixConfig(mode="auto", min_gain=0, kernel="math", min_speedup=1.5)
    schedule = PrefixSchedule(config)
    peak, reads = [100.0], [0]

    def peaks(_: Any) -> Peaks:
        reads[0] += 1
        if reads[0] % 2 == 0:  # after a step
            report: Any = schedule.report
            share = report.decision.share
            predicted = report.memory.peak if share else report.stock_bytes
            peak[0] = max(peak[0], 100.0 + seen[share][rank] * predicted)
        return Peaks(100.0, peak[0], 0.0)

    cost_meter.peaks = peaks  # the rank's own process
    items, found = steps.group(0, 4), []
    for _ in range(6):
        steps.zero_gradients(model)
        steps.call(schedule, Contract().step, model, items)
        (meter,) = schedule.planning.meters.values()
        report: Any = schedule.report
        found.append((report.decision.share, schedule.memory.limit, *meter.memory_factors))
        stock = report.stock_bytes
    static = float(sum(2 * p.numel() * p.element_size() for p in model.parameters()))
    assert found[0][1] == limit_of(stock, static)
    assert found[-1][1] == pytest.approx(limit_of(found[-2][2] * stock, static))
    runtime.shutdown()
    return found


@pytest.mark.parametrize(
    ("stock", "wanted"),
    [((1.5, 1.25), (3.0, 3.0)), ((4.0, 6.0), (6.0, 3.0))],  # ours had the maximum; stock has it
)
def test_all_ranks_correct_by_the_one_that_has_most(
    stock: tuple[float, float], wanted: tuple[float, float]
) -> None:
    one, other = run_ranks(2, corrected, {False: stock, True: (1.0, 3.0)})
    assert one == other
    assert {share for share, *_ in one[1:5]} == {False, True}, "auto times both schedules"
    assert one[0][2:] == (1.0, 1.0)
    assert one[-1][2:] == pytest.approx(wanted)


def apart(seen: dict[bool, float]) -> tuple[bool, tuple[float, float]]:
    """A rank's part of steps that the first rank shares and the second does not: whether it shared,
    and its factors."""
    runtime.initialize(Layout(dp=2))
    model = small_model(dtype=torch.float64, layout=Layout(dp=2))
    least = 100.0 if dist.get_rank() else 0.01
    config = PrefixConfig(mode="auto", min_gain=0, kernel="math", min_speedup=least)
    schedule = PrefixSchedule(config)
    reads = [0]

    def peaks(_: Any) -> Peaks:
        reads[0] += 1
        if reads[0] % 2:
            return Peaks(0.0, 0.0, 0.0)
        report: Any = schedule.report
        predicted = report.memory.peak if report.decision.share else report.stock_bytes
        return Peaks(0.0, seen[report.decision.share] * predicted, 0.0)

    cost_meter.peaks = peaks  # the rank's own process
    for _ in range(3):
        steps.zero_gradients(model)
        steps.call(schedule, Contract().step, model, steps.group(0, 4))
    (meter,) = schedule.planning.meters.values()
    found: Any = schedule.report
    runtime.shutdown()
    return found.decision.share, meter.memory_factors


def test_ranks_of_different_schedules_know_the_peaks_of_both() -> None:
    """Data-parallel ranks need not decide alike where they do not meet in a step."""
    one, other = run_ranks(2, apart, {False: 0.9, True: 1.2})
    assert (one[0], other[0]) == (True, False)
    assert one[1] == other[1] == pytest.approx((0.9, 1.2))
