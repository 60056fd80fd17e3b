"""Times of actions, in a step of the prefix schedule."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_prefix.device.clock import elapsed, now, wait_for
from megatron_prefix.parts import Attempt, StepPart
from megatron_prefix.plan.actions import Action
from megatron_prefix.run.report import StepReport
from megatron_prefix.run.request import Request

NAME = "stopwatch"
"""Of a `Stopwatch` in `StepReport.features`."""


class Stopwatch:
    """Times what one rank computes in one step; its zero is where it was made.

    On CUDA times are those of events in the current stream, on the CPU those of the host's clock.
    Waiting for a neighbour is not in them.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self._device = group, device
        self._marks: list[tuple[Action, Any, Any]] = []
        self._host: dict[Action, float] = {}
        dist.barrier(group=group)
        wait_for(device)
        self._zero = now(device)

    def forget(self) -> None:
        self._marks.clear()
        self._host.clear()

    @contextlib.contextmanager
    def timing(self, action: Action) -> Iterator[None]:
        begin, called = now(self._device), time.perf_counter()
        yield
        spent = time.perf_counter() - called
        self._marks.append((action, begin, now(self._device)))
        self._host[action] = self._host.get(action, 0.0) + spent

    def seconds(self) -> dict[Action, float]:
        """What this rank's actions took, parts of an action added up; waits for the device."""
        wait_for(self._device)
        spent: dict[Action, float] = {}
        for action, begin, end in self._marks:
            spent[action] = spent.get(action, 0.0) + elapsed(begin, end)
        return spent

    def host_seconds(self) -> dict[Action, float]:
        """What the host took to give the device these actions."""
        return dict(self._host)

    def marks(self) -> list[tuple[Action, float, float]]:
        """What was timed in its order, from and to how many seconds after the stopwatch was made;
        waits for the device."""
        wait_for(self._device)
        return [
            (action, elapsed(self._zero, begin), elapsed(self._zero, end))
            for action, begin, end in self._marks
        ]


class TimedActions(StepPart):
    """Times every action of a step that shares; ranks of a pipeline meet in a barrier before it."""

    _stopwatch: Stopwatch | None = None

    @contextlib.contextmanager
    def around_run(self, report: StepReport, request: Request) -> Iterator[None]:
        """See StepPart. The report gets the stopwatch, unless it has another part's."""
        if report.decision.share and NAME not in report.features:
            self._stopwatch = Stopwatch(request.rank.groups.pp, request.rank.device)
            report.features[NAME] = self._stopwatch
        yield

    def begin(self, attempt: Attempt) -> None:
        """See StepPart."""
        if self._stopwatch is not None:
            self._stopwatch.forget()

    def computing(self, action: Action) -> contextlib.AbstractContextManager[None]:
        """See StepPart."""
        stopwatch = self._stopwatch
        return contextlib.nullcontext() if stopwatch is None else stopwatch.timing(action)
