"""Sums over data-parallel ranks: plans bring them in order, and waiting for them always ends."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_prefix.errors import UserError
from megatron_prefix.features.experts.group_counts import GroupCounts
from megatron_prefix.features.experts.sums import progress, prove, sums_of
from megatron_prefix.features.plan_files.rules import check_plan
from megatron_prefix.plan.error import PlanError
from megatron_prefix.plan.gate import Decision
from megatron_prefix.plan.planner import loss_ready_after, make_plan
from megatron_prefix.plan.walk import seconds_of, walk
from megatron_prefix.run.agreement import check_counts, share_together
from tests.core.plan.test_planner import flat_forest
from tests.harness.trees import with_programs


def test_an_ordered_segment_waits_for_earlier_microbatches():
    forest = flat_forest()  # 0 (inner), leaves 1 2; 3 (inner), leaves 4 5
    assert (
        loss_ready_after(replace(forest, ordered=True))
        == loss_ready_after(forest)
        == [0, 1, 2, 3, 4, 5]
    )
    backwards = [3, 2, 1, 0]
    assert loss_ready_after(forest, backwards) == [0, 1, 2, 3, 4, 5]
    assert loss_ready_after(replace(forest, ordered=True), backwards) == [0, 5, 5, 3, 5, 5]
    assert loss_ready_after(replace(forest, ordered=True), [0, 1, 0, 1]) == [0, 4, 5, 3, 4, 5]


def test_a_sum_begins_early_only_if_no_other_is_under_way():
    plan = make_plan(replace(flat_forest(), ordered=True))
    plan = with_programs(plan, ["F0 F1 F2 F3 B2 B1 B0 F4 F5 B5 B4 B3".split()])
    sums = [f"{action} {number}" for action, number in sums_of(plan, range(4))]
    assert sums == ["F1 1", "F3 2", "F4 3", "F5 4"]


def test_a_sum_that_is_not_there_is_an_error():
    """What sums give, and their order, are rows with "experts global"."""
    router = SimpleNamespace(tp_dp_cp_group=SimpleNamespace(size=lambda: 1))
    sums, counts = GroupCounts(), torch.tensor([5.0, 6.0])
    assert [sums.enter(router), sums.enter(router)] == [0, 1]
    sums.add(0, 0, counts)
    with pytest.raises(RuntimeError, match="microbatch 0 begins, and only 1 of 2 routers"):
        sums.begin(1)
    sums.add(0, 0, counts)
    sums.add(1, 0, counts)
    with pytest.raises(RuntimeError, match="microbatch 0 asked for, but only 0"):
        sums.take(0, 0)
    sums.begin(1)
    assert sums.take(1, 0).tolist() == [5, 6]
    with pytest.raises(RuntimeError, match="microbatch 1 asked for, but only 1"):
        sums.take(0, 1)


# Data-parallel and expert-parallel ranks ----------------------------------------------------


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("share", [False, True])
def test_all_ranks_take_one_schedule(monkeypatch, share, others):
    limits = torch.tensor([others])
    monkeypatch.setattr(dist, "all_reduce", lambda mine, *_, **__: mine.copy_(mine.minimum(limits)))
    mine = Decision(share, "mine", False, 1.5)
    found = share_together(mine, "a group", torch.device("cpu"), "that is so")
    assert found.share == (share and bool(others))
    if share and not others:
        assert found.fallback and found.reason.endswith("takes the stock schedule, and that is so")
        assert "another data-parallel rank" in found.reason
    else:
        assert found == mine


@pytest.mark.parametrize(("number", "words"), [(2, "2 to 3"), (4, "3 to 4"), (3, "")])
def test_ranks_have_equally_many_microbatches(monkeypatch, number, words):
    limits = torch.tensor([3, -3])
    monkeypatch.setattr(dist, "all_reduce", lambda mine, **_: mine.copy_(mine.minimum(limits)))
    refused = pytest.raises(UserError, match=f"with {words} microbatches")
    with refused if words else contextlib.nullcontext():
        check_counts(number, None, torch.device("cpu"))


def can_run(plan, ready_after):
    """As a plan from a file is checked."""
    try:
        check_plan(plan, ready_after)
        walk(plan, seconds_of(plan))
    except PlanError:
        return False
    return True


def test_a_plan_that_waits_for_what_comes_later_is_refused():
    forest, microbatch_of = replace(flat_forest(), ordered=True), [1, 0, 2, 3]
    actions = "F0 F1 B1 F2 B2 B0 F3 F4 B4 F5 B5 B3".split()
    plan = with_programs(make_plan(forest), [actions])
    assert (0, 2) in progress(plan, 0, microbatch_of)  # B1 waits for two microbatches
    words = "rank 0: B1 waits for the global_aux_loss of 2 microbatches .* has counted 0"
    with pytest.raises(UserError, match=words):  # also where a file was checked for other ranks
        prove(plan, microbatch_of)
    assert not can_run(plan, loss_ready_after(forest, microbatch_of))
    assert can_run(plan, loss_ready_after(forest, [0, 1, 2, 3]))
