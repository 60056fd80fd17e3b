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
from tests.harness.rows import rows
from tests.harness.small_rows import small_rows  # noqa: F401

SAMPLE = """
dense/TP2+SP/tree/none
dense/PP4/chunked/full
dense/PP2xVPP2/tree/full
dense/CP2/tree/none
dense/DP2/chunked/none
dense/TP2xPP2/tree/full
dense/PP2xCP2/flat/none
moe/EP2/tree/none
moe/PP2xEP2/flat/full
moe/TP2xEP2xPP2/flat/none
dense/PP2xVPP2/packed/full
moe/CP2xEP4/packed/none
moe/TP2xCP2xEP2xPP2/packed/none
mla/TP2+SP/packed/none
mla/PP2xVPP2/tree/full
mla/CP2/packed/none
mla-moe/EP2/packed/none
mla-moe/TP2xCP2xEP2xPP2/packed/none
window/TP2+SP/packed/none
window/PP2xVPP2/chunked/full
window-moe/EP2/packed/none
""".split()
PRODUCTS = """
dense/TP2xPP2/tree/full
moe/PP2xEP2/flat/full
moe/TP2xEP2xPP2/flat/none
moe/CP2xEP4/packed/none
mla-moe/TP2xCP2xEP2xPP2/packed/none
""".split()
"""All of them go together in moe/TP2xCP2xEP2xPP2."""


@pytest.mark.parametrize("name", rows(SAMPLE, PRODUCTS))
def test_row(name: str) -> None:
    verdict = align_row(Row(*name.split("/")), timeout_s=120)
    assert verdict.passed, verdict.failures
    assert (verdict.baseline == "packed") == ("/packed/" in name)
    assert verdict.grad_max_rel_diff <= verdict.tolerance < 1e-12
    assert verdict.loss_max_abs_diff < 1e-12 and verdict.logprob_max_abs_diff < 1e-12
    assert 0 < verdict.executed_tokens < verdict.raw_tokens


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
