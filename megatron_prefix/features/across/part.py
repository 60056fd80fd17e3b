"""What data-parallel ranks have in common, as a part of the step: it runs on one of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from megatron_prefix.features.across.carried import Carried
from megatron_prefix.features.across.communicator import Communicator, communicator_of
from megatron_prefix.features.across.exchange_memory import ExchangeMemory
from megatron_prefix.features.across.exchanges import Exchanges
from megatron_prefix.features.across.final_states import FinalStates
from megatron_prefix.features.across.head import head, head_backward
from megatron_prefix.features.across.ledger import CrossingLedger
from megatron_prefix.features.across.step import RESTS, across, tell_alone, why_alone
from megatron_prefix.features.experts.part import routers_of
from megatron_prefix.parts import Attempt, StepPart
from megatron_prefix.run.request import Backoff

if TYPE_CHECKING:
    from megatron_prefix.config import PrefixConfig
    from megatron_prefix.errors import Reason
    from megatron_prefix.plan.actions import Action
    from megatron_prefix.plan.memory import Footprint
    from megatron_prefix.run.calls import Callbacks
    from megatron_prefix.run.execute.executor import Executor, Stage
    from megatron_prefix.run.planning import Planning
    from megatron_prefix.run.rank import Rank
    from megatron_prefix.run.read.step import Step
    from megatron_prefix.run.request import Request
    from megatron_prefix.tree import Forest


class Crossing(StepPart):
    """Payloads, final hidden states and routers' sums that cross data-parallel ranks.

    Attributes:
        communicator: of these ranks, in a step in which something crosses; else None.
    """

    def __init__(self, config: PrefixConfig, rank: Rank, callbacks: Callbacks) -> None:
        super().__init__(config, rank, callbacks)
        self._backoff = Backoff()
        self.communicator: Communicator | None = None
        self._exchanges: Exchanges | None = None
        self._attempt: Attempt | None = None

    def refusals(self) -> Iterator[Reason]:
        """See StepPart; here it is known what is kept.

        Raises:
            UserError: `across_ranks` is "on", and something is in the way.
        """
        self._backoff = self.kept.setdefault("backoff", self._backoff)
        together = self.callbacks.passes_together or not self.rank.forward_only
        why = why_alone(self.config, self.rank, together=together)
        if why is None and self.config.across == "auto" and self._backoff.skips():
            why = RESTS
        self.meets_data_ranks = why is None
        if why is not None:
            self.keep_local(why)
        yield from ()

    def keep_local(self, why: str) -> None:
        """See StepPart; logged once."""
        self.meets_data_ranks, self.why_local = False, why
        tell_alone(why, self.rank, self.kept.setdefault("logged", set()))

    def build(
        self,
        step: Step,
        request: Request,
        planning: Planning,
        build: Callable[..., Forest],
        build_alone: Callable[..., Forest],
    ) -> Step | None:
        """See StepPart."""
        if not self.meets_data_ranks:
            return None
        return across(step, request, planning, build, build_alone)

    def built(self, step: Step) -> None:
        """See StepPart."""
        if not self.meets_data_ranks:
            return
        tell_alone(step.why_alone, self.rank, self.kept.setdefault("logged", set()))
        self._backoff.note(useful=step.crosses)
        if self._backoff.is_due:
            self._backoff.begin()

    def footprint(self, footprint: Footprint) -> Footprint:
        """See StepPart: messages between data-parallel ranks have buffers."""
        return replace(footprint, buffers=ExchangeMemory)

    @contextlib.contextmanager
    def around_step(self, step: Step) -> Iterator[None]:
        """See StepPart."""
        if not step.crosses:
            yield
            return
        with communicator_of(self.rank.siblings, self.rank.device) as self.communicator:
            try:
                yield
            finally:
                self.communicator = None

    def begin(self, attempt: Attempt) -> None:
        """See StepPart."""
        if self.communicator is None:
            return
        self._attempt, forest = attempt, attempt.step.forest
        for stage in attempt.stages:
            if stage.is_last:
                stage.final = self._final(stage, forest)
        scored = [segment.scored for segment in forest.segments]
        ledgers = self._ledgers(attempt)
        chunks = [
            Carried(stage.model, stage.cache, ledger, stage.final, scored)
            for stage, ledger in zip(attempt.stages, ledgers, strict=True)
        ]
        device, forward_only = self.rank.device, self.rank.forward_only
        self._exchanges = Exchanges(forest, self.communicator, chunks, device, forward_only)
        attempt.report.crossed = self._exchanges.crossed

    def _ledgers(self, attempt: Attempt) -> Sequence[CrossingLedger | None]:
        """Of the stages' routers, which also count what other ranks compute."""
        routers = routers_of(attempt.parts)
        if routers is not None:
            crossing = [exchange.segment for exchange in attempt.step.forest.exchanges]
            routers.make_ledgers(functools.partial(CrossingLedger, crossing))
        ledgers = cast(Sequence[CrossingLedger], routers.ledgers if routers is not None else ())
        return ledgers or [None] * len(attempt.stages)

    def _final(self, stage: Stage, forest: Forest) -> FinalStates | None:
        """What of a last stage's decoder output crosses; None if nothing."""
        segments = {one.segment: forest.segments[one.segment] for one in forest.exchanges}
        scored = {index: segment for index, segment in segments.items() if segment.scored}
        if not scored:
            return None
        leaving = {index for index, segment in scored.items() if segment.source < 0}
        parallel: bool = stage.hooks.model.config.sequence_parallel
        return FinalStates(stage.cache, self.rank.groups.tp, parallel, leaving)

    def starts(self, action: Action, executor: Executor) -> bool:
        """See StepPart: what crosses before the action does so now."""
        if self._exchanges is None or self._attempt is None:
            return True
        index, chunk = action.segment, action.chunk
        stage: Any = executor.stages[chunk]
        is_own = self._attempt.step.forest.segments[index].source < 0
        if stage.final is not None:
            stage.final.head_backward = functools.partial(head_backward, executor, chunk)
        if action.kind == "F":
            self._exchanges.forward(index, chunk, stage.cache.map.visible(index) if is_own else ())
            for arrived in stage.final.fresh() if stage.final is not None else ():
                head(executor, arrived, chunk)
        else:
            self._exchanges.backward(index, chunk)
        return is_own

    def ran(self) -> None:
        """See StepPart."""
        if self._exchanges is not None:
            self._exchanges.finish()

    def end(self) -> None:
        """See StepPart."""
        self._exchanges = self._attempt = None
