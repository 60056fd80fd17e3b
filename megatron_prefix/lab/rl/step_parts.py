"""Parts that the lab adds to the steps of a schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from megatron_prefix.parts import Around, Run, StepPart
from megatron_prefix.plan.actions import Action
from megatron_prefix.run.request import Request
from megatron_prefix.run.schedule import PrefixSchedule


class WithPart(Around):
    """Adds a part to every call that may be shared.

    Args:
        make: makes it, of the arguments of a StepPart.
    """

    def __init__(self, schedule: PrefixSchedule, make: Callable[..., StepPart]) -> None:
        super().__init__(schedule.config, schedule.reports)
        self._make = make

    def shared(self, run: Run, request: Request) -> list[Any]:
        """See Around."""
        part = self._make(self.config, request.rank, request.callbacks)
        return run(replace(request, parts=(*request.parts, part)))


@contextlib.contextmanager
def with_part(schedule: PrefixSchedule, make: Callable[..., StepPart]) -> Iterator[None]:
    """Steps inside have a part more; see WithPart."""
    feature = WithPart(schedule, make)
    schedule.features.append(feature)
    try:
        yield
    finally:
        schedule.features.remove(feature)


@contextlib.contextmanager
def watching(
    schedule: PrefixSchedule, watch: Callable[[Action], contextlib.AbstractContextManager]
) -> Iterator[None]:
    """Steps inside run with `watch` around what every action computes."""

    class Watched(StepPart):
        def computing(self, action: Action) -> contextlib.AbstractContextManager:
            return watch(action)

    with with_part(schedule, Watched):
        yield
