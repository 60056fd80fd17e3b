"""Cases that the ranks of one job run, one after the other."""

import traceback
from collections.abc import Callable
from typing import Any

from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout
from tests.harness.ranks import run_ranks

Compare = Callable[[Any, Layout], str | None]
"""Raises for a case what is wrong with it, or returns it; nothing or "": it is right."""


def run_cases(layout, cases, compare):
    """A rank's part of a job: what went wrong in each case, "" for nothing."""
    runtime.initialize(layout)
    found = {}
    for name, case in cases.items():
        try:
            found[name] = compare(case, layout) or ""
        except Exception:  # noqa: BLE001  # the case fails, and the next one tells its own story
            found[name] = traceback.format_exc()
    runtime.shutdown()
    return found


def check_cases(layout, cases, compare):
    """Runs a job, and fails with all that went wrong in any case on any rank."""
    failures = [
        f"{name}, rank {rank}:\n{text}"
        for rank, found in enumerate(
            run_ranks(layout.world_size, run_cases, layout, cases, compare)
        )
        for name, text in found.items()
        if text
    ]
    assert not failures, "\n".join(failures)
