"""Sums over data-parallel ranks: plans bring them in order, and waiting for them always ends."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_prefix.errors import UserError
from megatron_prefix.features.experts.group_counts import GroupCounts
from megatron_prefix.features.experts.sums import progress, prove, sums_behind
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.check import PlanError, check_plan
from megatron_prefix.plan.gate import Decision
from megatron_prefix.plan.joint_forest import joint_forest
from megatron_prefix.plan.planner import loss_ready_after, make_plan
from megatron_prefix.plan.walk import seconds_of, walk
from megatron_prefix.run.agreement import check_counts, share_together
from megatron_prefix.tree import Forest
from tests.core.plan.test_planner import flat_forest
from tests.harness.trees import random_forest, with_programs


def test_an_ordered_segment_waits_for_earlier_microbatches() -> None:
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


def random_owned(rng: random.Random, most: int) -> tuple[Forest, list[int]]:
    """Any forest whose rollouts are in `most` microbatches, each of at least one."""
    forest = Forest((), (), ())
    while len(forest.num_positions) < most:
        forest = random_forest(rng)
    microbatch_of = [*range(most), *(rng.randrange(most) for _ in forest.num_positions[most:])]
    rng.shuffle(microbatch_of)
    return replace(forest, ordered=True), microbatch_of


def replica(rng: random.Random, num_ranks: int, num_chunks: int, most: int) -> tuple[Plan, list]:
    """Any plan of `most` microbatches, of one pipeline or of some that share experts."""
    pairs = [random_owned(rng, most) for _ in range(rng.choice((1, 1, 2, 3)))]
    joint = joint_forest(
        [forest for forest, _ in pairs], [microbatch_of for _, microbatch_of in pairs]
    )
    assert joint.union.ordered
    options = dict(num_chunks=num_chunks, run_ahead=rng.choice((1, 2, None)))
    plan = make_plan(joint.union, num_ranks, microbatches=joint.union_microbatch_of, **options)
    return plan, list(joint.union_microbatch_of)


class Replicas:
    """Data-parallel ranks side by side: messages inside each pipeline, sums across them."""

    def __init__(self, made: Sequence[tuple[Plan, list]]) -> None:
        self.plans = [plan for plan, _ in made]
        self.num_ranks = self.plans[0].num_ranks
        self.done: list[set] = [set() for _ in made]
        self.places = [[0] * self.num_ranks for _ in made]
        self.progress = [
            [progress(plan, rank, microbatch_of) for rank in range(self.num_ranks)]
            for plan, microbatch_of in made
        ]
        self.begun = [
            [[0, *sums_behind(plan, rank, microbatch_of)] for rank in range(self.num_ranks)]
            for plan, microbatch_of in made
        ]

    def started(self, number: int, rank: int) -> int:
        """Sums that a rank has started."""
        return self.begun[number][rank][self.places[number][rank]]

    def advance(self, number: int, rank: int) -> bool:
        """Runs the next action of a rank if what it waits for is there."""
        plan, place = self.plans[number], self.places[number][rank]
        program = plan.programs[rank]
        if place == len(program):
            return False
        kind, index, chunk, _ = program[place]
        stage, step = plan.stage(rank, chunk), 1 if kind == "F" else -1
        received = 0 <= stage - step < plan.num_stages
        if received and (kind, index, stage - step) not in self.done[number]:
            return False
        wanted = self.progress[number][rank][place][1]
        if any(self.started(other, rank) < wanted for other in range(len(self.plans))):
            return False
        self.done[number].add((kind, index, stage))
        self.places[number][rank] += 1
        return True

    def run(self) -> bool:
        """Whether all come to their end."""
        pairs = [(n, r) for n in range(len(self.plans)) for r in range(self.num_ranks)]
        while any(self.advance(number, rank) for number, rank in pairs):
            pass
        return all(self.places[n][r] == len(self.plans[n].programs[r]) for n, r in pairs)


@pytest.mark.parametrize("seed", range(60))
def test_replicas_with_any_trees_come_to_their_end(seed) -> None:
    rng = random.Random(seed)
    num_ranks = rng.randint(1, 4)
    num_chunks = rng.randint(1, 3) if num_ranks > 1 else 1
    most = rng.randint(1, 6)
    made = [replica(rng, num_ranks, num_chunks, most) for _ in range(rng.randint(1, 4))]
    assert Replicas(made).run()
    for plan, microbatch_of in made:  # no sum is asked for that the rank itself has not started
        for rank in range(num_ranks):
            assert all(done >= needed for done, needed in progress(plan, rank, microbatch_of))


def test_without_order_replicas_stop() -> None:
    forest = flat_forest()
    plain = [(make_plan(forest, microbatches=o), o) for o in ([0, 1, 2, 3], [3, 2, 1, 0])]
    assert not Replicas(plain).run()


def test_progress_counts_from_the_first_microbatch_on() -> None:
    microbatch_of = [1, 0, 2, 2]
    plan = make_plan(flat_forest(), microbatches=microbatch_of)
    steps = progress(plan, 0, microbatch_of)
    found = dict(zip(map(str, plan.programs[0]), steps, strict=True))
    assert found["F0"] == (0, 0)
    assert found["F3"][0] == 2
    assert found["B1"][1] == 2
    assert found["B2"][1] == 1
    assert found["B0"] == (2, 2)
    assert found["B3"] == (3, 3)


# The collectives ----------------------------------------------------------------------------------


class Work:
    """A sum on its way."""

    def __init__(self, log: list[str], number: int) -> None:
        self.log, self.number = log, number

    def wait(self) -> None:
        self.log.append(f"wait {self.number}")


@pytest.fixture
def log(monkeypatch) -> list[str]:
    """What is started and waited for."""
    found: list[str] = []

    def all_reduce(total, group, async_op):
        assert async_op
        number = sum("start" in line for line in found)
        found.append(f"start {total.tolist()}")
        total *= 10
        return Work(found, number)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return found


def counts(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_sums_start_in_order_and_once_all_routers_have_counted(log) -> None:
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
def test_all_ranks_take_one_schedule(monkeypatch, share, others) -> None:
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
def test_ranks_have_equally_many_microbatches(monkeypatch, number, words) -> None:
    limits = torch.tensor([3, -3])
    monkeypatch.setattr(dist, "all_reduce", lambda mine, **_: mine.copy_(mine.minimum(limits)))
    refused = pytest.raises(UserError, match=f"with {words} microbatches")
    with refused if words else contextlib.nullcontext():
        check_counts(number, None, torch.device("cpu"))


def can_run(plan: Plan, ready_after: Sequence[int]) -> bool:
    """As a plan from a file is checked."""
    try:
        check_plan(plan, ready_after)
        walk(plan, seconds_of(plan))
    except PlanError:
        return False
    return True


def test_a_plan_that_waits_for_what_comes_later_is_refused() -> None:
    forest, microbatch_of = replace(flat_forest(), ordered=True), [1, 0, 2, 3]
    actions = "F0 F1 B1 F2 B2 B0 F3 F4 B4 F5 B5 B3".split()
    plan = with_programs(make_plan(forest), [actions])
    assert (0, 2) in progress(plan, 0, microbatch_of)  # B1 waits for two microbatches
    words = "rank 0: B1 waits for the global_aux_loss of 2 microbatches .* has counted 0"
    with pytest.raises(UserError, match=words):  # also where a file was checked for other ranks
        prove(plan, 0, microbatch_of)
    assert not can_run(plan, loss_ready_after(forest, microbatch_of))
    assert can_run(plan, loss_ready_after(forest, [0, 1, 2, 3]))


def test_what_may_run_has_begun_the_sums_that_it_waits_for() -> None:
    runs = Counter[bool]()
    for seed in range(300):
        rng = random.Random(seed)
        forest, microbatch_of = random_owned(rng, rng.randint(1, 4))
        num_ranks = rng.randint(1, 3)
        ordered = replace(forest, ordered=rng.random() < 0.5)
        plan = make_plan(ordered, num_ranks, microbatches=microbatch_of)
        programs = [[*program] for program in plan.programs]
        for _ in range(rng.randint(0, 3)):
            program = rng.choice(programs)
            place = rng.randrange(len(program) - 1)
            program[place : place + 2] = reversed(program[place : place + 2])
        plan = replace(plan, programs=tuple(map(tuple, programs)))
        passes = can_run(plan, loss_ready_after(forest, microbatch_of))
        runs[passes] += 1
        for rank in range(num_ranks) if passes else ():
            assert all(done >= needed for done, needed in progress(plan, rank, microbatch_of))
    assert min(runs.values()) > 50
