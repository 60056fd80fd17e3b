"""Sums over data-parallel ranks: plans bring them in order, and waiting for them always ends."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_prefix.errors import UserError
from megatron_prefix.features.experts.group_counts import GroupCounts
from megatron_prefix.features.experts.sums import progress, prove, sums_behind
from megatron_prefix.plan.check import PlanError, check_plan
from megatron_prefix.plan.gate import Decision
from megatron_prefix.plan.planner import loss_ready_after, make_plan
from megatron_prefix.plan.walk import seconds_of, walk
from megatron_prefix.run.agreement import check_counts, share_together
from megatron_prefix.tree import build
from tests.core.plan.test_planner import flat_forest
from tests.harness.trees import exact, flat_rollouts, with_programs


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
    forest = build(*flat_rollouts(6, 2, 2, 4), exact(segment_tokens=2))
    plan = make_plan(replace(forest, ordered=True), 2, run_ahead=4)
    steps = [needed for _, needed in progress(plan, 0, range(8))]
    begun = waited = early = 0
    for needed, later, now in zip(
        steps, [*steps[1:], 0], sums_behind(plan, 0, range(8)), strict=True
    ):
        waited = max(waited, needed)
        if now > max(begun, later):
            assert begun == waited == now - 1
            early += 1
        begun = now
    assert early


class Work:
    """A sum on its way."""

    def __init__(self, log, number):
        self.log, self.number = log, number

    def wait(self):
        self.log.append(f"wait {self.number}")


@pytest.fixture
def log(monkeypatch):
    """What is started and waited for."""
    found = []

    def all_reduce(total, group, async_op):
        assert async_op
        number = sum("start" in line for line in found)
        found.append(f"start {total.tolist()}")
        total *= 10
        return Work(found, number)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return found


def counts(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_sums_start_in_order_and_once_all_routers_have_counted(log):
    router = SimpleNamespace(tp_dp_cp_group=SimpleNamespace(size=lambda: 2))
    sums = GroupCounts()
    assert [sums.enter(router), sums.enter(router)] == [0, 1]
    sums.add(0, 1, counts(1, 2))
    sums.add(1, 1, counts(3, 4))
    sums.add(1, 0, counts(5, 6))
    with pytest.raises(RuntimeError, match="microbatch 0 begins, and only 1 of 2 routers"):
        sums.begin(1)
    sums.add(1, 0, counts(5, 6))
    assert log == []
    with pytest.raises(RuntimeError, match="microbatch 0 asked for, but only 0"):
        sums.take(0, 0)
    sums.add(0, 0, counts(7, 8))
    assert log == []  # until it is said
    for number in (1, 2, 1, 2):
        sums.begin(number)
    assert log == ["start [[7, 8], [5, 6]]", "start [[1, 2], [3, 4]]"]
    assert sums.take(1, 0).tolist() == [50, 60]
    assert sums.take(0, 1).tolist() == [10, 20]
    assert sums.take(0, 0).tolist() == [70, 80]
    assert log[2:] == ["wait 0", "wait 1"]
    with pytest.raises(RuntimeError, match="microbatch 2 asked for, but only 2"):
        sums.take(0, 2)


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
        prove(plan, 0, microbatch_of)
    assert not can_run(plan, loss_ready_after(forest, microbatch_of))
    assert can_run(plan, loss_ready_after(forest, [0, 1, 2, 3]))
