"""The first steps of a kind, run by both schedules."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import refused
from megatron_prefix.features.verify.both import run_both, tell_unverified, tell_verified
from megatron_prefix.parts import Around, Run
from megatron_prefix.refusals.table import NOT_VERIFIED
from megatron_prefix.run.report import Reports
from megatron_prefix.run.request import Request, StepKind

NAME = "verify"
"""Of the `Verification` in `StepReport.features`."""


class Verify(Around):
    """Compares the first steps of each kind that would be shared, and again the first ones whose
    segments are padded, as their layers then run on CUDA graphs; a kind that fails is stock's."""

    def __init__(self, config: PrefixConfig, reports: Reports) -> None:
        super().__init__(config, reports)
        self._compared: WeakKeyDictionary[StepKind, Counter[bool]] = WeakKeyDictionary()

    def shared(self, run: Run, request: Request) -> list[Any]:
        """Runs a step; the trainer gets the stock schedule's results of those that are compared.

        Raises:
            CannotShare: the step is too far from the stock schedule's, in mode "on".
        """
        kind, most = request.kind, self.config.verify
        compared = self._compared.setdefault(kind, Counter())
        padded = any(part.even for part in request.parts)
        number = compared[padded] + 1
        if request.stock is not None or number > most:
            return run(request)
        outcome = run_both(run, request, self.reports)
        if outcome.problem:
            compared[True] = compared[False] = most
            tell_unverified(outcome.problem, request)
        elif outcome.verification is not None:
            compared[padded] = number
            report: Any = self.reports.last
            report.features[NAME] = outcome.verification
            tell_verified(report, outcome.verification, request, number, most)
            if outcome.verification.failure:
                self._disproved(kind, report, outcome.verification.failure)
        return outcome.store

    def _disproved(self, kind: StepKind, report: Any, failure: str) -> None:
        """Gives a kind to the stock schedule, from whose step another was too far; the report stays
        what it was of that."""
        kind.refusal = refused(NOT_VERIFIED, failure)
        if self.config.mode == "on":
            raise kind.refusal
        reason = str(kind.refusal)
        report.decision = replace(report.decision, share=False, fallback=True, reason=reason)
        self.reports.put(report)
