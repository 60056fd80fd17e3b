"""Heads of trainers' own, on models whose calls are answered as the stock schedule's are."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_prefix.lab.runtime import Layout
from tests.core.alignment.test_model_calls import SHARDED, Case, built, compare_with
from tests.harness.cases import check_cases
from tests.harness.own_heads import HEADS, HeadForm, HeadTrainer, put_into


def forms(*heads: str, **fields: Any) -> dict[str, Case]:
    """A case for each head."""
    return {head: Case(HeadForm(head=head, **fields)) for head in heads or HEADS}


ONE = {
    **forms(),
    **{f"{name}, rows": case for name, case in forms(packed=False).items()},
    **{f"{name}, no mask": case for name, case in forms(mask=False, pad=4).items()},
    "moved, forward only": Case(HeadForm(head="moved"), forward_only=True),
    "filled, forward only": Case(HeadForm(head="filled"), forward_only=True),
    "filled, recomputed": Case(
        HeadForm(head="filled"), build={"recompute": "full"}, prefix={"memory": "recompute"}
    ),
    "filled, which says something": Case(HeadForm(head="filled", scale=0.5)),
    "moved, experts": Case(HeadForm(head="moved"), model="tiny-moe"),
}
TP2 = {
    **forms(pad=2),
    **{f"{name}, rows": case for name, case in forms(packed=False).items()},
    **{f"{name}, no mask": case for name, case in forms(mask=False, pad=4).items()},
}
PP2 = {**forms(), **{f"{name}, at the ends": c for name, c in forms(where="ends").items()}}
JOBS = {
    "one rank": (Layout(), ONE),
    "TP2": (Layout(tp=2), forms()),
    "TP2 SP": (Layout(tp=2, sequence_parallel=True), TP2),
    "PP2": (Layout(pp=2), PP2),
    "CP2": (Layout(cp=2), {**forms("kernels", "filled"), **forms("kernels", packed=False)}),
    "TP2 SP CP2": (Layout(tp=2, cp=2, sequence_parallel=True), forms("kernels", "filled")),
    "TP2 SP PP2": (Layout(tp=2, pp=2, sequence_parallel=True), forms(pad=2)),
    "DP2": (Layout(dp=2), {n: Case(c.form, build=SHARDED) for n, c in forms(pad=4).items()}),
}


def compare(case: Case, layout: Layout) -> None:
    """Ours against the stock schedule on the same calls of the same model."""
    chunks = built(case, layout)
    for chunk in chunks:
        put_into(chunk, case.form.head)  # type: ignore[attr-defined]
    compare_with(case, layout, chunks, HeadTrainer)


@pytest.mark.parametrize("job", list(JOBS))
def test_heads_run_where_their_output_is_asked_for(job: str) -> None:
    check_cases(*JOBS[job], compare)
