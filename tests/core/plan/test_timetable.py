"""One order of actions and messages for all ranks: nothing can wait in a circle, whatever blocks.

The ranks' messages are recorded as `Links` issues them, between the actions, and played under the
strictest rules that a device can have: every rank does one thing after another, and a message ends
only when both its ends have come to it.
"""

from __future__ import annotations

import collections
import itertools
import random
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.joint_forest import joint_forest
from megatron_prefix.plan.planner import best_plan, make_plan
from megatron_prefix.plan.timetable import StageMessage, message_gaps, timetable
from megatron_prefix.run.execute import messages
from megatron_prefix.run.execute.messages import Channels
from megatron_prefix.tree import TreeOptions, build
from tests.harness.plans import random_case
from tests.harness.trees import flat_rollouts, random_forest

CPU = torch.device("cpu")


class Step(NamedTuple):
    """What some ranks do together: equal for all of them, and done when all have come to it."""

    name: Any
    ranks: frozenset[Any]


def stuck(programs: dict[Any, list[Step]]) -> list[Any]:
    """Ranks that wait for ever when each does one step after another."""
    left = {rank: collections.deque(steps) for rank, steps in programs.items()}
    moved = True
    while moved:
        moved = False
        for rank in left:
            while left[rank]:
                step = left[rank][0]
                if any(not left[other] or left[other][0] != step for other in step.ranks):
                    break
                for other in step.ranks:
                    left[other].popleft()
                moved = True
    return [rank for rank, steps in left.items() if steps]


class _Sent:
    """A message that has gone."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


def recorded(
    plan: Plan, joint: Plan, monkeypatch: pytest.MonkeyPatch, pipelines: int = 1, pipeline: int = 0
) -> dict[Any, list[Step]]:
    """What every rank of one of several pipelines side by side does, in order."""
    size = plan.num_ranks
    groups = {key: key for key in itertools.product("FB", range(3))}
    found = {}
    for rank in range(size):
        steps: list[Step] = []

        def note(tensor: Any, sender: int, receiver: int, group: Any, to: Any = steps) -> _Sent:
            ends = frozenset({(pipeline, sender), (pipeline, receiver)})
            to.append(Step((group, sender, receiver, tuple(tensor.shape)), ends))
            return _Sent()

        def send(tensor: Any, receiver: int, group: Any, me: int = rank) -> _Sent:
            return note(tensor, me, receiver, group)

        def receive(tensor: Any, sender: int, group: Any, me: int = rank) -> _Sent:
            return note(tensor, sender, me, group)

        monkeypatch.setattr(messages.dist, "isend", send)
        monkeypatch.setattr(messages.dist, "irecv", receive)
        channels = Channels(tuple(range(size)), rank, groups)
        shape = [(segment.padded_length, 0, index) for index, segment in enumerate(plan.segments)]
        links = messages.Links(channels, joint, shape.__getitem__, torch.float32, CPU, True)
        for place, action in enumerate(plan.programs[rank]):
            stage, last = plan.stage(rank, action.chunk), plan.num_stages - 1
            before, after = (0, last) if action.kind == "F" else (last, 0)
            links.advance()
            if stage != before:
                links.receive(action)
            beside = frozenset((other, rank) for other in range(pipelines))
            steps.append(Step((place, rank), beside))
            if stage != after:
                links.send(action, torch.empty(shape[action.segment]))
            links.advance()
        links.finish()
        found[pipeline, rank] = steps
    return found


@pytest.mark.parametrize("seed", range(2))
def test_no_random_plan_waits_in_a_circle(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        case = random_case(rng)
        plan = make_plan(case.forest, case.num_ranks, **case.options)
        assert not stuck(recorded(plan, plan, monkeypatch))


def side_by_side(rng: random.Random, together: bool, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two pipelines of unlike segments that meet in every action; the ranks that get stuck.

    Args:
        rng: makes them.
        together: the order is made from the segments of both, else each makes its own.
        monkeypatch: for `recorded`.
    """
    forests = [random_forest(rng) for _ in range(2)]
    microbatches_of = [range(len(forest.num_positions)) for forest in forests]
    num_ranks, num_chunks = rng.choice(((2, 1), (3, 1), (4, 1), (2, 2)))
    programs = {}
    for pipeline in range(2):
        mine = joint_forest(forests, microbatches_of, pipeline)
        plan = make_plan(
            mine.union, num_ranks, num_chunks=num_chunks, microbatches=mine.union_microbatch_of
        )
        own = replace(plan, segments=mine.forest.segments)
        programs |= recorded(own, plan if together else own, monkeypatch, 2, pipeline)
    return stuck(programs)


def test_pipelines_that_meet_in_every_action_keep_one_order(monkeypatch) -> None:
    rng = random.Random(1)
    assert not any(side_by_side(rng, True, monkeypatch) for _ in range(60))


def test_orders_of_their_own_would_make_them_wait_in_a_circle(monkeypatch) -> None:
    """So the play can find a circle, and the order must be a common one."""
    rng = random.Random(1)
    assert any(side_by_side(rng, False, monkeypatch) for _ in range(60))


@pytest.mark.parametrize(("num_ranks", "num_chunks"), [(2, 1), (4, 1), (3, 2), (2, 3)])
def test_messages_leave_after_their_action_and_arrive_before_use(num_ranks, num_chunks):
    forest = build(*flat_rollouts(64, 16, 4, 2), TreeOptions(segment_tokens=16))
    plan = make_plan(forest, num_ranks, num_chunks=num_chunks)
    place: dict[Any, int] = {}
    for number, entry in enumerate(timetable(plan)):
        assert entry not in place
        place[entry] = number
    messages = [key for key in place if isinstance(key, StageMessage)]
    assert len(messages) == 2 * (plan.num_stages - 1) * len(forest.segments)
    for sender, receiver, made_by, used_by in messages:
        here = place[StageMessage(sender, receiver, made_by, used_by)]
        assert place[sender, made_by] < here < place[receiver, used_by]
        assert made_by[:2] == used_by[:2]
        step = 1 if made_by.kind == "F" else -1
        stages = plan.stage(sender, made_by.chunk), plan.stage(receiver, used_by.chunk)
        assert stages[1] - stages[0] == step
    for rank in range(num_ranks):
        actions = [entry for entry in timetable(plan) if not isinstance(entry, StageMessage)]
        assert tuple(action for of, action in actions if of == rank) == plan.programs[rank]
        gaps = message_gaps(plan, rank)
        assert len(gaps) == 2 * len(plan.programs[rank]) + 1
        ours = [m for m in sorted(messages, key=place.__getitem__) if rank in m[:2]]
        assert [message for gap in gaps for message in gap] == ours
        assert not any(gaps[1::2])  # nothing crosses data-parallel ranks


def test_a_message_is_issued_when_its_sender_ends() -> None:
    """A receive waits on its device for no longer than the simulated run says."""
    forest = build(*flat_rollouts(256, 32, 6, 3), TreeOptions(segment_tokens=32, chunk_tokens=64))
    plan = best_plan(forest, 4)
    starts: dict[int, list[float]] = {rank: [] for rank in range(4)}
    ends = {}
    for event in simulate(plan).events:
        starts[event.rank].append(event.start)
        ends[event.rank, event.action] = event.end
    for rank in range(4):
        for number, gap in enumerate(message_gaps(plan, rank)[::2]):
            before = starts[rank][number - 1] if number else -1.0
            after = starts[rank][number] if number < len(starts[rank]) else float("inf")
            for message in gap:
                assert before < ends[message.sender, message.made_by] <= after
