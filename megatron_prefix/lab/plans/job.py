"""Simulates the plans of several data-parallel ranks that share prompts.  Pure.

They are checked first (job_check.py): so they can run even where messages block. Times are
those of asynchronous messages: a rank issues an `S` or `R` when it comes to it and goes on, its
messages cross one after another on a stream of their own, and what needs one waits for it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_prefix.lab.plans.job_check import End, Job, first_action, last_action
from megatron_prefix.lab.plans.timeline import Event, Timeline
from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.walk import Cost, token_cost


@dataclass(frozen=True)
class JobTimeline:
    """When every action of a job runs.

    Attributes:
        events: rank by rank in the order of its program; an `S` or `R` from when its message
            begins to cross until it has.
        makespan: end of the last action or message.
        busy: per rank the time in which it computes.
        waiting: per rank the time until its last action and message in which it does not.
        received_positions: per rank the positions of segments that others compute.
        peak_received: per rank the most of these alive: from the issue of a payload's `R` until the
            gradients have left.
    """

    events: tuple[Event, ...]
    makespan: float
    busy: tuple[float, ...]
    waiting: tuple[float, ...]
    received_positions: tuple[int, ...]
    peak_received: tuple[int, ...]

    def of_ranks(self, unit: str = "tokens") -> Timeline:
        """As if it were a pipeline's: the peaks are those of received positions."""
        return Timeline(self.events, self.makespan, self.busy, self.peak_received, unit)


def simulate_job(
    plans: Sequence[Plan],
    ready_after: Sequence[Sequence[int]] | None = None,
    *,
    cost: Cost = token_cost,
    seconds_per_position_sent: float = 0.0,
    seconds_per_position_back: float | None = None,
) -> JobTimeline:
    """Checks the plans of all data-parallel ranks together and simulates them.

    The n-th transfer to a peer, in the order of `Plan.transfers`, is the n-th segment that the peer
    has from this rank, in its F-order.

    Args:
        plans: one a data-parallel rank, each of one pipeline stage.
        ready_after: see `planner.loss_ready_after`, one a rank; received segments, which have no
            forward, are not waited for.
        cost: time of a computed segment's F or B.
        seconds_per_position_sent: of a payload, in the unit of `cost`.
        seconds_per_position_back: of its gradients; None: the same.

    Raises:
        PlanError: the plans cannot run; names rank, place and action, with a column a rank.
        ValueError: a plan of several stages.
    """
    for rank, plan in enumerate(plans):
        if plan.num_stages != 1:
            raise ValueError(
                f"the plan of data-parallel rank {rank} has {plan.num_ranks} pipeline ranks with"
                f" {plan.num_chunks} model chunks each: jobs are simulated with one stage"
            )
    job = Job(plans)
    for rank in range(len(plans)):
        job.check_program(rank, ready_after[rank] if ready_after is not None else None)
    job.pair()
    job.meet()
    sent, back = seconds_per_position_sent, seconds_per_position_back
    return _Run(job, cost, (sent, sent if back is None else back)).timeline()


# The simulation -----------------------------------------------------------------------------------


class _Run:
    """One run of a job that passed all checks.

    Attributes:
        clock: per rank the time up to which it has computed.
        streams: per rank the ends of messages that it issued and that have not crossed, in order.
        free: per rank the time up to which its messages have crossed.
        issued: of each end of a message when its rank came to it.
        events: per rank and action when it ran, or its message crossed.
    """

    def __init__(self, job: Job, cost: Cost, seconds: tuple[float, float]) -> None:
        self.job, self.cost, self.seconds = job, cost, seconds
        num = len(job.plans)
        self.place, self.clock, self.free = [0] * num, [0.0] * num, [0.0] * num
        self.streams: list[deque[Action]] = [deque() for _ in range(num)]
        self.issued: dict[End, float] = {}
        self.events: list[dict[Action, Event]] = [{} for _ in range(num)]

    def timeline(self) -> JobTimeline:
        """Runs every rank as far as it can, and again whenever a message has crossed."""
        ranks = range(len(self.job.plans))
        ready = deque(ranks)
        while ready:
            rank = ready.popleft()
            self._advance(rank)
            ready.extend(self._cross(rank))
        busy = tuple(
            sum(one.end - one.start for action, one in events.items() if action.peer < 0)
            for events in self.events
        )
        ends = [max(self.clock[rank], self.free[rank]) for rank in ranks]
        return JobTimeline(
            events=tuple(
                self.events[rank][one] for rank in ranks for one in self.job.programs[rank]
            ),
            makespan=max(ends, default=0.0),
            busy=busy,
            waiting=tuple(end - time for end, time in zip(ends, busy, strict=True)),
            received_positions=tuple(
                sum(one.padded_length for one in plan.segments if one.source >= 0)
                for plan in self.job.plans
            ),
            peak_received=tuple(map(self._peak, ranks)),
        )

    def _advance(self, rank: int) -> None:
        """Runs a rank's actions until one needs what has not arrived."""
        program, events = self.job.programs[rank], self.events[rank]
        while self.place[rank] < len(program):
            action = program[self.place[rank]]
            if action.peer >= 0:
                self.issued[rank, action] = self.clock[rank]
                self.streams[rank].append(action)
            else:
                awaited = [one for one in self.job.needs[rank][action] if one.kind == "R"]
                if not all(one in events for one in awaited):
                    return
                start = max([self.clock[rank], *(events[one].end for one in awaited)])
                segment = self.job.plans[rank].segments[action.segment]
                self.clock[rank] = start + self.cost(segment, action.kind)
                events[action] = Event(rank, action, start, self.clock[rank])
            self.place[rank] += 1

    def _cross(self, rank: int) -> set[int]:
        """Lets a rank's messages cross, in order; returns all ranks that this may let go on."""
        changed = set()
        while self.streams[rank]:
            end = (rank, self.streams[rank][0])
            other = self.job.other[end]
            theirs = self.streams[other[0]]
            if not theirs or theirs[0] != other[1]:
                break
            ends = (end, other)
            start = max(max(self.issued[one], self.free[one[0]]) for one in ends)
            stop = start + self._seconds(end)
            for one, action in ends:
                self.streams[one].popleft()
                self.free[one] = stop
                self.events[one][action] = Event(one, action, start, stop)
                changed.add(one)
        return changed

    def _seconds(self, end: End) -> float:
        """Of a message: it has the positions of the segment where that is received as a whole."""
        for rank, action in (end, self.job.other[end]):
            segment = self.job.plans[rank].segments[action.segment]
            if segment.source >= 0:
                return self.seconds[action.kind == "S"] * segment.padded_length
        raise RuntimeError(f"{end[1]} of rank {end[0]}: no end of the message receives a segment")

    def _peak(self, rank: int) -> int:
        """Most positions of received segments alive at a time."""
        changes = []
        for index, segment in enumerate(self.job.plans[rank].segments):
            if segment.source >= 0:
                begin, end = first_action(index, segment), last_action(index, segment)
                positions, places = segment.padded_length, self.job.places[rank]
                changes.append((self.issued[rank, begin], places[begin], positions))
                changes.append((self.events[rank][end].end, places[end], -positions))
        changes.sort()  # at one time in the order of the program
        return max(itertools.accumulate((one for *_, one in changes), initial=0))
