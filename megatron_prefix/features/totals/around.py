"""Counts the calls of one schedule, and says at the end of the process how many were shared."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_prefix.config import PrefixConfig
from megatron_prefix.parts import Around, Run
from megatron_prefix.run.report import Reports, StepReport
from megatron_prefix.run.request import Request

logger = logging.getLogger(__name__)
UPDATES, PASSES, UNREAD = "updates", "passes without gradients", "calls"
"""Kinds of calls. The last are left to the stock schedule before it is known which they are."""


@dataclass
class Total:
    """Of calls of one kind.

    Attributes:
        calls, shared: how many there were, and how many of them the prefix schedule ran.
        raw, executed: positions of the rollouts of shared calls, and of these the computed ones.
        saved: seconds that shared calls took less than the stock schedule's, as predicted.
    """

    calls: int = 0
    shared: int = 0
    raw: int = 0
    executed: int = 0
    saved: float = 0.0

    def add(self, report: StepReport) -> None:
        """One more call."""
        self.calls += 1
        if report.decision.share:
            self.shared += 1
            self.raw += report.forest.raw_tokens
            self.executed += report.forest.executed_tokens
            if (seconds := report.prediction) is not None:
                self.saved += seconds.stock_seconds - seconds.prefix_seconds

    def described(self, name: str) -> str:
        """In words."""
        if name == UNREAD:
            return f"{self.calls:,} more calls left to the stock schedule unread"
        text = f"{self.shared:,} of {self.calls:,} {name} shared"
        if not self.shared:
            return text
        took = f", about {self.saved:,.0f} s saved (predicted)" if self.saved else ""
        return f"{text}, {self.executed / max(self.raw, 1):.0%} of their tokens computed{took}"


class Totals(Around):
    """Of one schedule. As a warning: many a trainer hides other lines of a package that it does not
    know."""

    def __init__(self, config: PrefixConfig, reports: Reports) -> None:
        super().__init__(config, reports)
        self.totals: dict[str, Total] = {}
        self._kind = UNREAD
        self._counted: StepReport | None = None

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """See Around. Calls that end with an error do not count; one may be entered twice."""
        self._kind = UNREAD
        yield
        report = self.reports.last
        if report is not None and report is not self._counted:
            if not self.totals:
                atexit.register(self.tell)
            self.totals.setdefault(self._kind, Total()).add(report)
            self._counted = report

    def shared(self, run: Run, request: Request) -> list[Any]:
        """See Around."""
        self._kind = PASSES if request.rank.forward_only else UPDATES
        return run(request)

    def tell(self) -> None:
        """Logs the totals, on the first rank."""
        if int(os.environ.get("RANK", "0")):
            return
        texts = [total.described(name) for name, total in self.totals.items()]
        logger.warning("megatron_prefix: %s", "; ".join(texts))
