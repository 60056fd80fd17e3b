"""What a step did, for metrics and benchmarks."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.gate import Decision
from megatron_prefix.plan.peak_memory import RankMemory
from megatron_prefix.plan.prediction import Prediction
from megatron_prefix.plan.simulator import simulate
from megatron_prefix.run.timing import Stopwatch
from megatron_prefix.tree import Forest


@dataclass
class StepReport:
    """What the last step did; the numbers behind the `prefix_sharing/` metrics.

    Attributes:
        forest: the step's segments.
        decision: which schedule ran and why.
        plan: what the prefix schedule runs or would have run.
        joint: the same actions on the segments of all pipelines that run side by side.
        fallback_count: steps so far in which the stock schedule ran although sharing was wanted.
        prediction: both schedules' times; None where none was made.
        times: what it was made from.
        stopwatch: times of this rank's actions, in a step that was measured.
        memory: predicted of this rank, where the prefix schedule ran with gradients.
        base_bytes: allocated on the device when the step began.
        room_bytes: what the step could still use then; 0 where nobody knows.
        cache_bytes: the most that K/V, states and their gradients took on the device at once.
        retried: memory ran out, and the step was made once more.
    """

    forest: Forest
    decision: Decision
    plan: Plan
    joint: Plan
    fallback_count: int = 0
    prediction: Prediction | None = None
    times: CostModel | None = None
    stopwatch: Stopwatch | None = None
    memory: RankMemory | None = None
    base_bytes: int = 0
    room_bytes: float = 0.0
    cache_bytes: int = 0
    retried: bool = False

    @property
    def predicted_peak(self) -> float | None:
        """Predicted peak of device memory in bytes, with what was there when the step began."""
        if self.memory is None:
            return None
        return self.base_bytes + self.memory.within(self.room_bytes).peak

    @property
    def measured_peak(self) -> int | None:
        """Peak of allocated device memory in bytes, over all that has run since the process's
        statistics were last reset; None without a GPU."""
        return torch.cuda.max_memory_allocated() if self.base_bytes else None

    def phases(self, makespan: float | None = None) -> dict[str, float]:
        """Seconds that this rank computed in phase A (forwards of inner segments), B (waves) and C
        (backwards of inner segments), and that it did not compute (`wait`); empty in a step that
        was not timed.

        Args:
            makespan: seconds of the whole step; None: from this rank's first action to its last.
        """
        if self.stopwatch is None or not self.decision.share:
            return {}
        spent = dict.fromkeys("ABC", 0.0)
        for action, seconds in self.stopwatch.seconds().items():
            spent[_phase(self.plan, action)] += seconds
        whole = self.stopwatch.span() if makespan is None else makespan
        return {**spent, "wait": max(0.0, whole - sum(spent.values()))}

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time in which they wait, simulated with what is known of times."""
        return _bubble_fraction(self.plan, self.times)


def _phase(plan: Plan, action: Action) -> str:
    if not plan.segments[action.segment].inner:
        return "B"
    return "A" if action.kind == "F" else "C"


@functools.lru_cache(maxsize=16)
def _bubble_fraction(plan: Plan, times: CostModel | None) -> float:
    action_time = functools.partial(times.action, plan) if times is not None else None
    return simulate(plan, action_time=action_time).bubble_fraction
