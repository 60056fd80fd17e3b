"""What one rank cannot do, none does: at once and with the same reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_prefix.errors import CannotShare, StepFailed, refused
from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.refusals.table import NOT_CAUSAL
from megatron_prefix.run.agreement import agree
from megatron_prefix.run.rank import default_groups, several
from tests.harness.ranks import run_ranks

CPU = torch.device("cpu")
LAYOUT = Layout(tp=2, pp=2)


def test_a_rank_alone() -> None:
    assert agree(None, [], CPU) is None
    refusal = CannotShare("no")
    assert agree(refusal, [], CPU) is refusal
    with pytest.raises(KeyError):
        agree(KeyError("x"), [], CPU)


def said(problems: dict[int, BaseException], layout: Layout = LAYOUT) -> Any:
    """What a rank hears when some have a problem."""
    runtime.initialize(layout)
    try:
        made = default_groups()
        groups = several(made.tp, made.pp, made.dp_cp)
        found = agree(problems.get(torch.distributed.get_rank()), groups, CPU)
        refusal = () if found is None or found.refusal is None else (found.refusal,)
        return None if found is None else ("falls back", str(found), *refusal)
    except (StepFailed, KeyError) as error:
        return type(error).__name__, str(error)
    finally:
        runtime.shutdown()


def test_all_ranks_go_on_where_none_has_a_problem() -> None:
    assert run_ranks(4, said, {}) == [None] * 4


def test_one_that_cannot_share_takes_all_with_it() -> None:
    assert run_ranks(4, said, {2: CannotShare("a mask")}) == [("falls back", "a mask")] * 4


def test_all_ranks_hear_of_the_refusal_itself() -> None:
    found = run_ranks(2, said, {1: refused(NOT_CAUSAL)}, Layout(pp=2))
    assert found == [("falls back", NOT_CAUSAL.given().text, NOT_CAUSAL)] * 2


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(cp=2), Layout(dp=2, ep=2), Layout(pp=2)])
def test_ranks_of_every_kind_hear_of_it(layout: Layout) -> None:
    problems = {1: CannotShare("a mask")}
    assert run_ranks(2, said, problems, layout) == [("falls back", "a mask")] * 2


def test_one_that_fails_ends_all_with_its_reason() -> None:
    problems = {1: KeyError("data"), 2: CannotShare("a mask")}
    heard = ("StepFailed", "the step ends on all ranks: rank 1: KeyError: 'data'")
    assert run_ranks(4, said, problems) == [heard, ("KeyError", "'data'"), heard, heard]
