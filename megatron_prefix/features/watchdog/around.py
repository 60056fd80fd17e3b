"""Every call of a schedule, watched."""

from __future__ import annotations

import contextlib
from typing import Any

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.watchdog.watchdog import Watchdog, predicted_seconds
from megatron_prefix.parts import Around
from megatron_prefix.run.report import Reports


class WatchedCalls(Around):
    """Says where a call stands that takes far too long."""

    def __init__(self, config: PrefixConfig, reports: Reports) -> None:
        super().__init__(config, reports)
        self._watchdog = Watchdog(60 * config.watchdog_minutes)

    def call(self) -> contextlib.AbstractContextManager[Any]:
        """Around a call; the step before it says how long the next may take."""
        return self._watchdog.step(lambda: predicted_seconds(self.reports.last))
