"""Multi-token prediction in layouts of several ranks, against the stock schedule in fp64."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_prefix.lab.cli.matrix import align_row
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import matrix
from megatron_prefix.lab.verify.matrix import Row
from megatron_prefix.layers import mtp
from tests.core.alignment.test_overlap import Job, trees
from tests.harness import ranks  # noqa: F401  # ranks are forked from here

OVERRIDES: dict[str, dict[str, Any]] = {
    "dense": {"mtp_num_layers": 1},
    "moe": {"mtp_num_layers": 1, "moe_aux_loss_coeff": 1e-2},
}
# Before 0.19 Megatron's checkpoint of the layer does not take a pack.
ROWS = """
dense/TP2/chunked/none
dense/TP2+SP/packed/none
dense/PP2/tree/full
dense/PP2xVPP2/packed/none
dense/CP2/packed/none
dense/CP2/chunked/full
dense/DP2/packed/none
moe/EP2/tree/none
moe/TP2+SP/packed/none
moe/PP2xEP2/flat/full
moe/CP2xEP2/packed/none
""".split()


@pytest.fixture(autouse=True)
def _with_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    for model, fields in OVERRIDES.items():
        monkeypatch.setitem(matrix.OVERRIDES, model, fields)


@pytest.mark.parametrize("name", ROWS)
def test_row(name: str) -> None:
    verdict = align_row(Row(*name.split("/")), timeout_s=120)
    assert verdict.passed, verdict.failures
    assert verdict.grad_max_rel_diff <= verdict.tolerance < 1e-12
    assert 0 < verdict.executed_tokens < verdict.raw_tokens


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_reductions_during_backwards(pp: int, tied: bool) -> None:
    """Five steps, also of the optimizer; the output layer, which may get a row of this loss or
    none, is waited for."""
    model = {"mtp_num_layers": 1, "tie_embeddings": tied}
    job = Job(layout=Layout(pp=pp, dp=2), model=model)
    expected, found = job.on_ranks("SSSSS", False, trees), job.on_ranks("PPPPP", True, trees)
    for ours, stock in zip(found, expected, strict=True):
        for parameter, value in stock.parameters.items():
            assert_close(ours.parameters[parameter], value, 3000, what=parameter)
        assert all(step.reduced_once() and not step.late for step in ours.watched)
    assert any(step.early for step in found[0].watched)


def test_a_row_can_be_different(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the owner's share of a context-parallel rank taken for that of the other."""
    sums = mtp.Division.in_loss

    def changed(self: mtp.Division, left: Any, whole: Any) -> Any:
        return sums(self, left[:, ::-1], whole[:, ::-1])

    monkeypatch.setattr(mtp.Division, "in_loss", changed)
    verdict = align_row(Row("dense", "CP2", "packed", "none"), timeout_s=120)
    assert not verdict.passed and any("gradient of" in failure for failure in verdict.failures)
