"""Numbers of a step's report, for metrics and benchmarks."""

from __future__ import annotations

import functools

import torch

from megatron_prefix.features.measure.stopwatch import NAME as STOPWATCH
from megatron_prefix.features.measure.stopwatch import Stopwatch
from megatron_prefix.lab.plans.timeline import Event, Timeline, simulate
from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.run.agreement import all_say
from megatron_prefix.run.report import StepReport


def predicted_peak(report: StepReport) -> float | None:
    """Predicted peak of device memory in bytes, with what was there when the step began; None
    while nothing was measured. Copies to the host are waited for only when memory is short, so
    offloaded tensors may stay on the device longer."""
    memory = report.memory
    if memory is None or not memory.kept:
        return None
    lingering = min(report.room_bytes, memory.cache_peak + memory.staged) if memory.staged else 0.0
    return report.base_bytes + max(memory.peak, lingering)


def measured_peak(report: StepReport) -> int | None:
    """Peak of allocated device memory in bytes, over all that has run since the process's
    statistics were last reset; None without a GPU."""
    return torch.cuda.max_memory_allocated() if report.base_bytes else None


def stopwatch_of(report: StepReport | None) -> Stopwatch | None:
    """What has timed a step's actions; None if nothing has."""
    return None if report is None else report.features.get(STOPWATCH)


def phases(report: StepReport, makespan: float | None = None) -> dict[str, float]:
    """Seconds that this rank computed in phase A (forwards of inner segments), B (waves) and C
    (backwards of inner segments), and that it did not compute (`wait`); empty in a step that was
    not timed. It waits for the device.

    Args:
        report: of the step.
        makespan: seconds of the whole step; None: from this rank's first action to its last.
    """
    stopwatch = stopwatch_of(report)
    if stopwatch is None or not report.decision.share:
        return {}
    spent = dict.fromkeys("ABC", 0.0)
    for action, seconds in stopwatch.seconds().items():
        inner = "A" if action.kind == "F" else "C"
        spent[inner if report.plan.segments[action.segment].waits else "B"] += seconds
    marks = stopwatch.marks()
    if makespan is None:
        makespan = marks[-1][2] - marks[0][1] if marks else 0.0
    return {**spent, "wait": max(0.0, makespan - sum(spent.values()))}


def bubble_fraction(report: StepReport) -> float:
    """Share of all ranks' time in which they wait, simulated with what is known of times."""
    return _simulated(report.plan, report.times).bubble_fraction


@functools.lru_cache(maxsize=16)
def _simulated(plan: Plan, times: CostModel | None) -> Timeline:
    action_time = functools.partial(times.action, plan) if times is not None else None
    return simulate(plan, action_time=action_time)


def timeline(stopwatch: Stopwatch, plan: Plan) -> Timeline:
    """The step of all ranks in milliseconds; every rank of the pipeline calls this together."""
    local = [(action, 1e3 * begin, 1e3 * end) for action, begin, end in stopwatch.marks()]
    ranks = all_say(local, stopwatch.group)
    first = min((begin for marks in ranks for _, begin, _ in marks), default=0.0)
    events = tuple(
        Event(rank, Action(*action), begin - first, end - first)
        for rank, marks in enumerate(ranks)
        for action, begin, end in marks
    )
    return Timeline(
        events=events,
        makespan=max((event.end for event in events), default=0.0),
        busy=tuple(sum(end - begin for _, begin, end in marks) for marks in ranks),
        peak_positions=plan.peak_positions,
        unit="ms",
    )
