"""The rules that a plan must keep, and the error that marks where it breaks one.  Pure.

Every rank runs one F and one B of every segment on each of its model chunks, parents before
children forward, children before parents backward. On the last stage a backward comes after the
forward that completes its losses. Two neighbours agree on the order of their messages, so that each
direction is a FIFO. Deadlocks are found by the simulator (plan/simulator.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_prefix.errors import UserError
from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.grid import Cell, marked_grid
from megatron_prefix.tree import Segment


class PlanError(UserError):
    """A plan that cannot run.

    The first line says what is wrong; the whole grid with the bad cells marked follows.

    Attributes:
        marked: the bad cells.
        grid: the text below the first line.
    """

    def __init__(self, message: str, plan: Plan, marked: Sequence[Cell]) -> None:
        self.marked = tuple(marked)
        self.grid = marked_grid(plan.programs, self.marked)
        super().__init__(f"{message}\n{self.grid}")


def check(plan: Plan, ready_after: Sequence[int] | None = None) -> None:
    """Checks everything but deadlocks, which `simulate` finds.

    Args:
        plan: any plan.
        ready_after: see `planner.loss_ready_after`.

    Raises:
        PlanError: naming rank, place and action, with the grid.
    """
    children = [0] * len(plan.segments)
    for segment in plan.segments:
        if segment.parent >= 0:
            children[segment.parent] += 1
    for rank in range(plan.num_ranks):
        _Program(plan, rank, children).check(ready_after)
    if plan.num_ranks > 1:
        for rank in range(plan.num_ranks):
            _check_link(plan, "F", rank, (rank + 1) % plan.num_ranks)
            _check_link(plan, "B", rank, (rank - 1) % plan.num_ranks)


class _Program:
    """Checks one rank's program: each action once, parents and children in order.

    Attributes:
        forwards, backwards: per model chunk and segment whether it has run.
        waiting: per model chunk and segment the children whose backward has not run.
        reached: on the last stage, the forwards of all segments before this one have run.
    """

    def __init__(self, plan: Plan, rank: int, children: Sequence[int]) -> None:
        self.plan, self.rank, self.reached = plan, rank, 0
        self.forwards = [[False] * len(children) for _ in range(plan.num_chunks)]
        self.backwards = [[False] * len(children) for _ in range(plan.num_chunks)]
        self.waiting = [list(children) for _ in range(plan.num_chunks)]

    def check(self, ready_after: Sequence[int] | None) -> None:
        """Checks every action in order."""
        take = {"F": self._forward, "B": self._backward}
        num, num_chunks = len(self.plan.segments), self.plan.num_chunks
        last = self.plan.num_stages - 1
        for place, action in enumerate(self.plan.programs[self.rank]):
            kind, index, chunk = action
            if kind not in take or not (0 <= index < num and 0 <= chunk < num_chunks):
                what = f"{num} segments and {num_chunks} model chunks a rank, counted from 0"
                raise self._error(place, f"does not exist: the plan has {what}")
            fault = take[kind](index, chunk)
            if (
                kind == "B"
                and ready_after is not None
                and self.plan.stage(self.rank, chunk) == last
            ):
                fault = fault or self._loss_missing(ready_after[index], chunk)
            if fault:
                raise self._error(place, fault)
        for kind, table in (("F", self.forwards), ("B", self.backwards)):
            for chunk, done in enumerate(table):
                if not all(done):
                    raise self._missing(Action(kind, done.index(False), chunk))

    def _forward(self, index: int, chunk: int) -> str:
        done, parent = self.forwards[chunk], self.plan.segments[index].parent
        if done[index]:
            return "runs a second time"
        if parent >= 0 and not done[parent]:
            return f"runs before the forward of its parent {parent}"
        done[index] = True
        return ""

    def _backward(self, index: int, chunk: int) -> str:
        done, parent = self.backwards[chunk], self.plan.segments[index].parent
        if done[index]:
            return "runs a second time"
        if not self.forwards[chunk][index]:
            return "runs before its own forward"
        if self.waiting[chunk][index]:
            segments = enumerate(self.plan.segments)
            child = next(c for c, s in segments if s.parent == index and not done[c])
            return f"runs before the backward of its child {child}"
        done[index] = True
        if parent >= 0:
            self.waiting[chunk][parent] -= 1
        return ""

    def _loss_missing(self, ready_after: int, chunk: int) -> str:
        done = self.forwards[chunk]
        while self.reached < len(done) and done[self.reached]:
            self.reached += 1
        if ready_after < self.reached:
            return ""
        return f"needs a loss that takes all forwards up to F{ready_after}"

    def _error(self, place: int, text: str) -> PlanError:
        return _error(self.plan, self.rank, place, text)

    def _missing(self, action: Action) -> PlanError:
        place = len(self.plan.programs[self.rank])
        return PlanError(f"rank {self.rank} never runs {action}", self.plan, [(self.rank, place)])


def _check_link(plan: Plan, kind: str, source: int, target: int) -> None:
    """Sender and receiver must agree on the order of the messages of one direction."""
    step = 1 if kind == "F" else -1
    ends = (0, plan.num_stages - 1)
    first, last = ends[::step]  # `first` receives nothing, `last` sends nothing
    size = plan.num_ranks  # plan.stage() is too slow for thousands of plans
    sent = [
        (index, chunk * size + source + step)
        for this, index, chunk in plan.programs[source]
        if this == kind and chunk * size + source != last
    ]
    places, received = [], []
    for place, (this, index, chunk) in enumerate(plan.programs[target]):
        stage = chunk * size + target
        if this == kind and stage != first:
            places.append(place)
            received.append((index, stage))
    if sent == received:
        return
    pairs = enumerate(zip(sent, received, strict=True))
    number = next(i for i, (one, other) in pairs if one != other)
    other = Action(kind, sent[number][0], sent[number][1] // size)
    text = f"takes message {number} from rank {source}, which sends the one for {other} there"
    raise _error(plan, target, places[number], text)


def _error(plan: Plan, rank: int, place: int, text: str) -> PlanError:
    action = plan.programs[rank][place]
    return PlanError(f"rank {rank}, place {place}: {action} {text}", plan, [(rank, place)])


# The segment table --------------------------------------------------------------------------------


def check_segments(segments: Sequence[Segment]) -> None:
    """Checks that segments read from a file are a forest as tree/build.py makes it.

    Raises:
        UserError: names the segment, or a rollout that is in no segment.
    """
    reached: dict[int, int] = {}  # last segment of each rollout so far
    for index, segment in enumerate(segments):
        fault = _segment_fault(segments, index)
        members = [rollout for span in segment.spans for rollout in span.rollouts]
        if not fault and len(set(members)) < len(members):
            fault = "has a rollout twice"
        lost = [rollout for rollout in members if reached.get(rollout, -1) != segment.parent]
        if not fault and lost:
            where = reached.get(lost[0], -1)
            fault = f"rollout {lost[0]} comes from segment {where}, not from {segment.parent}"
        if fault:
            raise UserError(f"segment {index}: {fault}")
        reached.update(dict.fromkeys(members, index))
    for rollout in range(max(reached, default=-1)):
        if rollout not in reached:
            raise UserError(f"rollout {rollout} is in no segment")


def _segment_fault(segments: Sequence[Segment], index: int) -> str:
    """What is wrong with one segment, not looking at its rollouts."""
    segment = segments[index]
    # A span without rollouts is a filler (plan/joint_forest.py): only padding.
    if not segment.spans or any(
        not bool(span.rollouts) <= span.length <= span.padded or not span.padded
        for span in segment.spans
    ):
        return "a span has no positions, or more than its padded length"
    if segment.inner and (
        len(segment.spans) > 1 or segment.spans[0].length < segment.spans[0].padded
    ):
        return "an inner segment is one span without padding"
    begin = 0
    if segment.parent >= 0:
        parent = segments[segment.parent]
        if segment.parent >= index or not parent.inner:
            return f"its parent {segment.parent} is no inner segment before it"
        begin = parent.spans[0].end
    if segment.extends and not (segment.inner and segment.parent >= 0):
        return "only an inner segment extends its parent"
    if any(span.start != begin for span in segment.spans):
        return f"a span starts at {segment.start}, not at {begin}, where its parent ends"
    return ""
