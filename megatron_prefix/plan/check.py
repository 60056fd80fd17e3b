"""The rules that a plan must keep, and the error that marks where it breaks one.  Pure.

Every rank runs one F and one B of every segment on each of its model chunks, parents before
children forward, children before parents backward. On the last stage a backward comes after the
forward that completes its losses. Two neighbours agree on the order of their messages, so that each
direction is a FIFO. Deadlocks are found by the simulator (plan/simulator.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from megatron_prefix.errors import UserError
from megatron_prefix.plan.actions import Action, Plan

Cell = tuple[int, int]
"""(rank, place in its program); the place after the last one stands for a missing action."""


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


def check_plan(plan: Plan, ready_after: Sequence[int] | None = None) -> None:
    """Checks everything but deadlocks, which `simulate` finds.

    Args:
        plan: any plan.
        ready_after: see `planner.loss_ready_after`.

    Raises:
        PlanError: naming rank, place and action, with the grid.
    """
    parents = [segment.parents for segment in plan.segments]
    for rank in range(plan.num_ranks):
        _Program(plan, rank, parents).check(ready_after)
    if plan.num_ranks > 1:
        for rank in range(plan.num_ranks):
            _check_link(plan, "F", rank, (rank + 1) % plan.num_ranks)
            _check_link(plan, "B", rank, (rank - 1) % plan.num_ranks)


class _Program:
    """Checks one rank's program: each action once, parents and readers in order.

    Attributes:
        forwards, backwards: per model chunk and segment whether it has run.
        waiting: per model chunk and segment how many that read it wait for their backward.
        reached: on the last stage, the forwards of all segments before this one have run.
    """

    def __init__(self, plan: Plan, rank: int, parents: Sequence[Sequence[int]]) -> None:
        self.plan, self.rank, self.reached, self.parents = plan, rank, 0, parents
        readers = [0] * len(parents)
        for parent in itertools.chain.from_iterable(parents):
            readers[parent] += 1
        self.forwards = [[False] * len(parents) for _ in range(plan.num_chunks)]
        self.backwards = [[False] * len(parents) for _ in range(plan.num_chunks)]
        self.waiting = [list(readers) for _ in range(plan.num_chunks)]

    def check(self, ready_after: Sequence[int] | None) -> None:
        """Checks every action in order."""
        take = {"F": self._forward, "B": self._backward}
        num, num_chunks = len(self.plan.segments), self.plan.num_chunks
        last = self.plan.num_stages - 1
        for place, action in enumerate(self.plan.programs[self.rank]):
            kind, index, chunk, _ = action
            if kind not in take or not (0 <= index < num and 0 <= chunk < num_chunks):
                what = f"{num} segments and {num_chunks} model chunks a rank, counted from 0"
                raise _error(self.plan, self.rank, place, f"does not exist: the plan has {what}")
            fault = take[kind](index, chunk)
            if (
                kind == "B"
                and ready_after is not None
                and self.plan.stage(self.rank, chunk) == last
            ):
                fault = fault or self._loss_missing(ready_after[index], chunk)
            if fault:
                raise _error(self.plan, self.rank, place, fault)
        for kind, table in (("F", self.forwards), ("B", self.backwards)):
            for chunk, done in enumerate(table):
                if not all(done):
                    missing = Action(kind, done.index(False), chunk)
                    end = [(self.rank, len(self.plan.programs[self.rank]))]
                    raise PlanError(f"rank {self.rank} never runs {missing}", self.plan, end)

    def _forward(self, index: int, chunk: int) -> str:
        done = self.forwards[chunk]
        if done[index]:
            return "runs a second time"
        for parent in self.parents[index]:
            if not done[parent]:
                return f"runs before the forward of its parent {parent}"
        done[index] = True
        return ""

    def _backward(self, index: int, chunk: int) -> str:
        done = self.backwards[chunk]
        if done[index]:
            return "runs a second time"
        if not self.forwards[chunk][index]:
            return "runs before its own forward"
        if self.waiting[chunk][index]:
            readers = enumerate(self.parents)
            child = next(c for c, above in readers if index in above and not done[c])
            return f"runs before the backward of its child {child}"
        done[index] = True
        for parent in self.parents[index]:
            self.waiting[chunk][parent] -= 1
        return ""

    def _loss_missing(self, ready_after: int, chunk: int) -> str:
        done = self.forwards[chunk]
        while self.reached < len(done) and done[self.reached]:
            self.reached += 1
        if ready_after < self.reached:
            return ""
        return f"needs a loss that takes all forwards up to F{ready_after}"


def _check_link(plan: Plan, kind: str, source: int, target: int) -> None:
    """Sender and receiver must agree on the order of the messages of one direction."""
    step = 1 if kind == "F" else -1
    ends = (0, plan.num_stages - 1)
    first, last = ends[::step]  # `first` receives nothing, `last` sends nothing
    size = plan.num_ranks  # plan.stage() is too slow for thousands of plans
    expected = [
        (index, chunk * size + source + step)
        for this, index, chunk, _ in plan.programs[source]
        if this == kind and chunk * size + source != last
    ]
    places, received = [], []
    for place, (this, index, chunk, _) in enumerate(plan.programs[target]):
        stage = chunk * size + target
        if this == kind and stage != first:
            places.append(place)
            received.append((index, stage))
    if expected == received:
        return
    pairs = enumerate(zip(expected, received, strict=True))
    number = next(i for i, (a, b) in pairs if a != b)
    sender_action = Action(kind, expected[number][0], expected[number][1] // size)
    text = (
        f"takes message {number} from rank {source}, which sends the one for {sender_action} there"
    )
    raise _error(plan, target, places[number], text)


def _error(plan: Plan, rank: int, place: int, text: str) -> PlanError:
    action = plan.programs[rank][place]
    return PlanError(f"rank {rank}, place {place}: {action} {text}", plan, [(rank, place)])


# The grid ----------------------------------------------------------------------------------------


def marked_grid(programs: Sequence[Sequence[Action]], marked: Sequence[Cell] = ()) -> str:
    """The whole plan, one line a place and one column a rank.

    Marked cells read `>B3<`, and their lines end in an arrow, as in the error grid of
    `_format_pipeline_order` in torch/distributed/pipelining/schedules.py.
    """
    lengths = [len(program) for program in programs] + [place + 1 for _, place in marked]
    num_lines = max(lengths, default=0)
    columns = [_column(rank, program, num_lines, marked) for rank, program in enumerate(programs)]
    numbers = ["", *map(str, range(num_lines))]
    width = max(map(len, numbers))
    lines = []
    for place, (number, *cells) in enumerate(zip(numbers, *columns, strict=True), start=-1):
        arrow = "  <-- here" if any(place == where for _, where in marked) else ""
        lines.append(f"{number:>{width}}  {' '.join(cells)}{arrow}".rstrip())
    return "\n".join(lines)


def _column(
    rank: int, program: Sequence[Action], num_lines: int, marked: Sequence[Cell]
) -> list[str]:
    """A rank's column with its heading, all of one width."""
    cells = [f" rank {rank}"]
    for place in range(num_lines):
        text = str(program[place]) if place < len(program) else ""
        cells.append(f">{text or 'end'}<" if (rank, place) in marked else f" {text}")
    width = max(map(len, cells)) + 1
    return [cell.ljust(width) for cell in cells]
