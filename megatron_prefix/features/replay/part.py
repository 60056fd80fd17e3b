"""Routes of a step: noted where forward steps call the model, read, and followed by segments."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_prefix.errors import Reason, refused
from megatron_prefix.features import may_replay, replays_routes
from megatron_prefix.features.experts.part import routers_of
from megatron_prefix.features.experts.routers import routers as routers_in
from megatron_prefix.features.replay import routes, swaps
from megatron_prefix.features.replay.segments import Replay, SegmentRoutes
from megatron_prefix.features.replay.told import RECORD, Told, is_known, replays_of, told
from megatron_prefix.parts import Attempt, StepPart
from megatron_prefix.refusals.table import (
    AHEAD_ROUTES,
    RECORDS_ROUTES,
    ROUTES_IN_ORDER,
    UNKNOWN_ROUTES,
)
from megatron_prefix.run.calls import CallLayout
from megatron_prefix.run.read.forward_step_state import Swap
from megatron_prefix.run.read.read_calls import CallTokens
from megatron_prefix.run.read.step import Step
from megatron_prefix.run.read.suspend import Capture, SuspendedStep


class RoutedStep(StepPart):
    """What the routers of this rank are to follow in a call."""

    _of_calls: Sequence[Tensor | None] = ()
    _of_routers: routes.ToldRoutes | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._routers = [routers_in(model) for model in self.rank.language_models]
        self._told: list[dict[int, tuple[Any, list[Told]]]] = []

    def refusals(self) -> Iterator[Reason]:
        """See StepPart."""
        for routers in self._routers:
            for number, router in routers.items():
                if not is_known(router):
                    yield ROUTES_IN_ORDER.given(number)

    @property
    def counts_calls(self) -> bool:  # type: ignore[override]
        """See StepPart: a queue of routes has an entry for each call, in their order."""
        return may_replay(self.rank.config)

    def swaps(self, chunk: int) -> Sequence[Swap]:
        """See StepPart."""
        routers = self._routers[chunk].items()
        self._routers[chunk] = {
            n: router for n, router in routers if replays_of(router) is not None
        }
        replayed = swaps.replayed_routes([*self._routers[chunk].values()])
        return replayed, swaps.stages_of_queues()

    def suspended(self, step: SuspendedStep) -> dict[int, Told | None]:
        """See StepPart: by layer what each router was told, with routes of its own."""
        routers = self._routers[step.chunk]
        by_layer = {layer: told(router, step.number) for layer, router in routers.items()}
        return {layer: routes and routes.kept() for layer, routes in by_layer.items()}

    def read_last(self, capture: Capture, last: CallTokens | None) -> None:
        """See StepPart."""
        rank, provided = self.rank, self.callbacks.routes
        self._told = [
            routes.told_of(self._routers[chunk], [step.notes[self] for step in steps])
            for chunk, steps in enumerate(capture.steps)
        ]
        if provided is not None and rank.is_first and replays_routes(rank.config):
            self._of_calls = [provided(call) for call in capture.calls(0)]
        if provided is None and may_replay(rank.config):
            self._of_routers = routes.read_routes(self._told, rank)
        self._told = [_without_routes(by_layer) for by_layer in self._told]
        for step in itertools.chain(*capture.steps):
            step.notes.pop(self)

    def same(self, layouts: Sequence[CallLayout]) -> Sequence[Tensor | None]:
        """See StepPart: int [positions, layers, topk] of every call."""
        groups, of_routers, of_calls = self.rank.groups, self._of_routers, self._of_calls
        self._of_routers, self._of_calls = None, ()  # nobody needs them twice
        if of_routers is None:
            return of_calls
        return of_routers.gathered(layouts, groups.cp.size(), groups.pp, self.rank.device)

    def check(self, step: Step) -> None:
        """See StepPart.

        Raises:
            CannotShare: routers record routes, or follow routes that are not known.
        """
        for chunk, model in enumerate(self.rank.language_models):
            for layer, (_, (first, *_)) in self._told[chunk].items():
                if first.action == RECORD:
                    raise refused(RECORDS_ROUTES)
                if not step.routed:
                    raise refused(UNKNOWN_ROUTES, first.action)
                if layer >= len(model.decoder.layers):
                    raise refused(AHEAD_ROUTES)

    def begin(self, attempt: Attempt) -> None:
        """See StepPart.

        Raises:
            UserError: routes of another model.
        """
        rank, step = self.rank, attempt.step
        if not step.routed:
            return
        # On all stages, whether they have routers or not.
        shape = rank.config.num_layers, rank.config.moe_router_topk
        followed = SegmentRoutes(step.forest, step.samples, shape, rank.groups, rank.device)
        by_router = {
            router: calls[0]._replace(has_mask=any(call.has_mask for call in calls))
            for by_layer in self._told
            for router, calls in by_layer.values()
        }
        part = routers_of(attempt.parts)
        if part is not None:
            part.around |= dict.fromkeys(by_router, Replay(followed, by_router).around)

    def finished(self) -> None:
        """See StepPart: routers are left as by the stock schedule."""
        for by_layer in self._told:
            for router, calls in by_layer.values():
                if (replays := replays_of(router)) is not None:
                    replays.passed(len(calls), backward=not self.rank.forward_only)


def _without_routes(
    by_layer: Mapping[int, tuple[Any, Sequence[Told]]],
) -> dict[int, tuple[Any, list[Told]]]:
    return {
        layer: (router, [call._replace(routes=None) for call in calls])
        for layer, (router, calls) in by_layer.items()
    }
