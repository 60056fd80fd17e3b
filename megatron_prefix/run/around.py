"""What features do around the calls of a schedule.

The schedule makes one object of each when it is made itself; the table of features says which.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

from megatron_prefix import features, parts
from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare
from megatron_prefix.megatron.stock import run_stock
from megatron_prefix.run.report import Reports
from megatron_prefix.run.request import Request

Run = Callable[[Request], list[Any]]
"""Runs a call with the prefix schedule, or leaves it to the stock one; returns what Megatron's
schedules return."""


class Around:
    """A feature around the calls of one schedule: what a class leaves out changes nothing.

    Args:
        config: what the user set.
        reports: of the schedule's steps.
    """

    def __init__(self, config: PrefixConfig, reports: Reports) -> None:
        self.config, self.reports = config, reports

    def call(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around every call, whichever schedule runs it."""
        return contextlib.nullcontext()

    def shared(self, run: Run, request: Request) -> list[Any]:
        """Runs a call that may be shared; all ranks that make a step together come here.

        Args:
            run: what this is around; it may be given a changed request.
            request: the call.
        """
        return run(request)


class _Missing(Around):
    """A feature that is needed and cannot be imported: calls are the stock schedule's."""

    def __init__(self, config: PrefixConfig, reports: Reports, reason: CannotShare) -> None:
        super().__init__(config, reports)
        self._reason = reason

    def shared(self, run: Run, request: Request) -> list[Any]:
        self.reports.refused(copy.copy(self._reason))
        return run_stock(request.arguments)


def chosen(config: PrefixConfig, reports: Reports) -> list[Around]:
    """The features that these options ask for, imported now; the first is the innermost."""
    objects: list[Around] = []
    for feature in features.AROUND:
        if not feature.wanted(config):
            continue
        try:
            make = parts.loaded(feature, config.mode)
        except CannotShare as reason:
            objects.append(_Missing(config, reports, reason.with_traceback(None)))
        else:
            objects += [] if make is None else [make(config, reports)]
    return objects
