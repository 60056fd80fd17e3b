"""Measuring, around the calls of a schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.measure.byte_meter import ByteMeter
from megatron_prefix.features.measure.cost_meter import CostMeter
from megatron_prefix.features.measure.outlines import Outlines
from megatron_prefix.features.measure.stopwatch import TimedActions
from megatron_prefix.megatron.stock import run_stock
from megatron_prefix.parts import Around, Attempt, Run, entered
from megatron_prefix.plan.actions import Action
from megatron_prefix.plan.gate import Decision
from megatron_prefix.run.report import Reports, StepReport
from megatron_prefix.run.request import Request


class Measure(Around):
    """Measures some calls, and now and then times the stock schedule instead."""

    def __init__(self, config: PrefixConfig, reports: Reports) -> None:
        super().__init__(config, reports)
        self._bytes: dict[Hashable, ByteMeter] = {}
        self.meters: dict[Hashable, CostMeter] = {}

    def _meter(self, request: Request) -> CostMeter:
        rank = request.rank
        if rank.layout not in self.meters:
            num_bytes = self._bytes_of(request)
            self.meters[rank.layout] = CostMeter(self.config, rank, request.costs, num_bytes)
        return self.meters[rank.layout]

    def _bytes_of(self, request: Request) -> ByteMeter:
        return self._bytes.setdefault(request.rank.layout, ByteMeter(request.costs))

    def shared(self, run: Run, request: Request) -> list[Any]:
        """See Around."""
        if request.stock is not None:
            with self._watched(request):
                return run(request)
        request.costs.begin(request.rank)
        meter = self._meter(request)
        decision = meter.begin(request)
        if decision is not None:
            return self._timed(decision, request, meter)
        part = MeasuredStep(meter, self.config, request.rank, request.callbacks)
        return run(replace(request, parts=(*request.parts, part)))

    def _timed(self, decision: Decision, request: Request, meter: CostMeter) -> list[Any]:
        """A step of the stock schedule, to time it; nothing of it is read before it has run."""
        report, outlines = self.reports.stock(decision), Outlines(request)
        with meter.step(report, request, outlines), outlines.noted():
            return run_stock(request.arguments)

    @contextlib.contextmanager
    def _watched(self, request: Request) -> Iterator[None]:
        """Around the stock schedule's run of a kind's first step."""
        if self.config.mode != "auto" or request.rank.forward_only:
            yield
            return
        with self._bytes_of(request).watching(request.rank):
            yield
        if request.kind.refusal is None:
            self._meter(request).ran_stock()


class MeasuredStep(TimedActions):
    """One call whose segments may run."""

    def __init__(self, meter: CostMeter, *options: Any) -> None:
        super().__init__(*options)
        self._meter, self.measures = meter, meter.due
        self._counter: Any = None

    @contextlib.contextmanager
    def around_run(self, report: StepReport, request: Request) -> Iterator[None]:
        """See StepPart."""
        with self._meter.step(report, request) as self._counter, contextlib.ExitStack() as stack:
            if self.measures:
                stack.enter_context(super().around_run(report, request))
            yield

    def decided(self, decision: Decision) -> Decision:
        """See StepPart."""
        return self._meter.chosen(decision)

    def begin(self, attempt: Attempt) -> None:
        """See StepPart."""
        super().begin(attempt)
        if self._counter is not None:
            caches = [stage.cache.device_bytes for stage in attempt.stages]
            self._counter.begin(attempt.plan, caches, gathers=attempt.gathers)

    def computing(self, action: Action) -> contextlib.AbstractContextManager[Any]:
        """See StepPart."""
        timing = super().computing(action)
        if self._counter is None:
            return timing
        return entered([timing, self._counter.counting(action)])
