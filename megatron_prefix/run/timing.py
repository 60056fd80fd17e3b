"""Measured timelines: when the actions of a real step began and ended, on every pipeline rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.simulator import Event, Timeline, simulate


class Stopwatch:
    """Times what one rank computes in one step; its zero is where it was made.

    On CUDA times are those of events in the current stream, on the CPU those of the host's clock.
    Waiting for a neighbour is not in them.

    Args:
        group: the pipeline's process group, whose ranks make theirs together.
        device: of the model.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._marks: list[tuple[Action, Any, Any]] = []
        dist.barrier(group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._zero = self._now()

    def forget(self) -> None:
        """Drops what has been timed: the step is made again."""
        self._marks.clear()

    @contextlib.contextmanager
    def timing(self, action: Action) -> Iterator[None]:
        """Times what runs inside; an action may be timed in several parts."""
        begin = self._now()
        yield
        self._marks.append((action, begin, self._now()))

    def seconds(self) -> dict[Action, float]:
        """What this rank's actions took, parts of an action added up; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        spent: dict[Action, float] = {}
        for action, begin, end in self._marks:
            spent[action] = spent.get(action, 0.0) + (self._ms(end) - self._ms(begin)) / 1e3
        return spent

    def span(self) -> float:
        """Seconds from the begin of this rank's first action to the end of its last; waits for the
        device."""
        if not self._marks:
            return 0.0
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return (self._ms(self._marks[-1][2]) - self._ms(self._marks[0][1])) / 1e3

    def timeline(self, plan: Plan) -> Timeline:
        """The step of all ranks in milliseconds; every rank of the pipeline calls this together."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        mine = [(action, self._ms(begin), self._ms(end)) for action, begin, end in self._marks]
        ranks: list[Any] = [None] * self._group.size()
        dist.all_gather_object(ranks, mine, group=self._group)
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
            peak_positions=simulate(plan).peak_positions,
            unit="ms",
        )

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, mark: Any) -> float:
        if self._device.type != "cuda":
            return 1e3 * (mark - self._zero)
        return self._zero.elapsed_time(mark)
