"""Reading: what the suspended forward steps of a call have called the model with, as segments.

All ranks that make a step together end, or fall back, together where one of them cannot read it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from megatron_prefix.errors import UserError, refused
from megatron_prefix.layers import fused_yarn
from megatron_prefix.refusals.own_errors import is_own, softened
from megatron_prefix.refusals.table import FUSED_YARN
from megatron_prefix.run import parts_of_call
from megatron_prefix.run.agreement import agree, agree_on, tried
from megatron_prefix.run.execute.memory_control import MemoryControl
from megatron_prefix.run.execute.rewind import Rewind
from megatron_prefix.run.planning import Planning
from megatron_prefix.run.read.read_calls import ReadCalls, read_calls
from megatron_prefix.run.read.step import Step, read_step, told
from megatron_prefix.run.read.suspend import Capture
from megatron_prefix.run.report import Reports
from megatron_prefix.run.request import Request, unlooked
from megatron_prefix.tree import Forest

logger = logging.getLogger(__name__)
Build = Callable[..., Forest]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Python looks for no cycles of references meanwhile; afterwards it does if it did before.

    Reading and planning a step of some 270 rollouts makes enough objects for 8 to 18 collections,
    2 to 6 ms, and every now and then for one of everything that the trainer has: 0.2 to 0.4 s where
    torch and Megatron-Core are all there is (2 CPU cores; benchmarks/LOG.md). It lasts
    to the first action's end: then the host is ahead of the device, and a collection costs less.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class StepReader:
    """Reads the steps of one schedule."""

    def __init__(self, memory: MemoryControl, planning: Planning, reports: Reports) -> None:
        self._memory, self._planning = memory, planning
        self._config, self._reports = planning.config, reports

    def read(self, capture: Capture, request: Request) -> tuple[Step | None, Request]:
        """The step; None, with a report, if its calls cannot be answered from segments; and the
        call with the parts of features that they need."""
        calls, request = self._agreed_calls(capture, request)
        return None if calls is None else self._step(calls, request), request

    def _step(self, calls: ReadCalls, request: Request) -> Step | None:
        planning, rank = self._planning, request.rank
        judge, unjudged = tried(lambda: planning.judge(request))
        build: Build = functools.partial(planning.build, request=request, judge=judge)
        build_alone, has_rounds = build, rank.experts is not None and rank.ordered
        if has_rounds and not self._config.plan_file:
            build_alone = functools.partial(planning.build_together, request=request, judge=judge)
        is_later = request.may_cross or build_alone is not build  # when ranks have agreed to go on
        filters = self._config.mode == "auto" and not request.may_cross
        step, problem = read_step(
            calls, rank.groups, None if is_later else build, rank.device,
            functools.partial(planning.shares_nothing, rank=rank) if filters else None,
        )  # fmt: skip
        if step is not None:
            _, problem = tried(functools.partial(_check_step, step, request))
        if self._is_refused(problem or unjudged, request):
            return None
        if step is None or not is_later or step.unshared:
            return step
        return self._together(step, request, build, build_alone)

    def _agreed_calls(self, capture: Capture, request: Request) -> tuple[ReadCalls | None, Request]:
        """This rank's model calls; None, with a report, if a rank cannot read its own, or if no
        rank wants to. See `read`."""
        rank, kind, calls = request.rank, request.kind, None
        problem: BaseException | None = kind.problem
        if problem is None:
            calls, request, problem = self._calls(capture, request)
        # Where a trainer's groups do not say which ranks are data-parallel, these may meet later
        # without having agreed on this.
        wish = kind.backoff is not None and kind.backoff.is_due and rank.data_ranks is not None
        reason, is_skipped = agree_on(problem, wish, request.agreeing, rank.device)
        if reason is not None:
            kind.refusal = reason if reason.lasts else None  # all ranks have heard
            self._reports.refused(reason)
            return None, request
        if is_skipped and kind.backoff is not None:
            kind.backoff.begin()
            kind.backoff.skips()  # this step
            report = self._reports.stock(unlooked())
            self._reports.logged.add(report.decision.reason)  # of all of them
            return None, request
        return calls, request

    def _calls(
        self, capture: Capture, request: Request
    ) -> tuple[ReadCalls | None, Request, BaseException | None]:
        try:
            capture.run()
        except BaseException as error:  # noqa: BLE001  # the other ranks wait to hear of it
            own = isinstance(error, Exception) and not isinstance(error, UserError)
            capture.is_broken = own and is_own(error)  # type: ignore[arg-type]
            problem = softened(error, self._config.mode) if capture.is_broken else error
            return None, request, problem
        try:
            called = itertools.chain(*map(capture.calls, range(len(capture.steps))))
            if lacking := parts_of_call.missing([*called], request.parts):
                parts_needed = parts_of_call.made(
                    lacking, self._config, request.rank, request.callbacks
                )
                request = replace(request, parts=(*request.parts, *parts_needed))
            calls = read_calls(capture, request)
            if self._config.mode != "observe":
                # Before the host plans: the device looks at the gradients in the meantime.
                self._memory.before = Rewind(request.rank)
        except BaseException as error:  # likewise
            logger.debug("this rank's microbatches cannot be read", exc_info=True)
            return None, request, softened(error, self._config.mode)
        return calls, request, None

    def _together(
        self, step: Step, request: Request, build: Build, build_alone: Build
    ) -> Step | None:
        """A step with segments that data-parallel ranks make together, some of which may cross
        them; they end or fall back together. `build`, `build_alone`: see StepPart."""
        rank = request.rank

        def make() -> Step:
            for part in request.parts:
                if built := part.build(step, request, self._planning, build, build_alone):
                    return built
            return step.with_forest(build_alone(step.samples or (), step.microbatch_of))

        step_made, problem = tried(make) if rank.is_first else (None, None)
        if rank.num_stages > 1:
            step_made = told(step_made, step.samples, rank.groups.pp, rank.device)
        if self._is_refused(problem, request):
            return None
        if step_made is None:
            raise RuntimeError("no rank says why a step has no segments")
        for part in request.parts:
            part.built(step_made)
        return step_made

    def _is_refused(self, problem: BaseException | None, request: Request) -> bool:
        """Whether any rank has a problem: then there is a report; all ranks call this."""
        problem = softened(problem, self._config.mode)
        reason = agree(problem, request.agreeing, request.rank.device)
        if reason is not None:
            self._planning.forget()
            self._reports.refused(reason)
        return reason is not None


def _check_step(step: Step, request: Request) -> None:
    if len({*step.packed}) > 1 and fused_yarn.differs(request.rank.config):
        raise refused(FUSED_YARN, "packs and rows of one step")
    for part in request.parts:
        part.check(step)
