"""A sample of the alignment matrix; `bash launch/align_matrix.sh` runs all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_prefix.lab.cli.matrix import align_row
from megatron_prefix.lab.verify.matrix import Row
from megatron_prefix.plan.actions import Plan
from megatron_prefix.run.execute import executor
from tests.harness import ranks  # noqa: F401  # ranks are forked from here
from tests.harness.small_rows import small_rows  # noqa: F401


def test_a_row_can_be_different(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last action of every rank, the backward of a root, is left out."""

    def shorter(self: executor.Executor, plan: Plan, *rest: Any, **more: Any) -> None:
        programs = tuple(program[:-1] for program in plan.programs)
        made(self, replace(plan, programs=programs), *rest, **more)

    made = executor.Executor.__init__
    monkeypatch.setattr(executor.Executor, "__init__", shorter)
    verdict = align_row(Row("dense", "DP2", "flat", "none"), timeout_s=60)
    assert not verdict.passed
    assert any("gradient of" in failure for failure in verdict.failures)
