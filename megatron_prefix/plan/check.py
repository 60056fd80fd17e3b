"""The rules that a plan must keep, and the error that marks where it breaks one.  Pure.

Every rank runs one F and one B of every segment on each of its model chunks, parents before
children forward, children before parents backward. On the last stage a backward comes after the
forward that completes its losses. Two neighbours agree on the order of their messages, so that each
direction is a FIFO. Deadlocks are found by `walk`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set

from megatron_prefix.errors import UserError
from megatron_prefix.plan.actions import STEP, Action, Plan

Cell = tuple[int, int]
"""(rank, place in its program); the place after the last one stands for a missing action."""


class PlanError(UserError):
    """A plan that cannot run: a line that says why, and the `grid` with the `marked` cells."""

    def __init__(self, message: str, plan: Plan, marked: Sequence[Cell]) -> None:
        self.marked = tuple(marked)
        self.grid = marked_grid(plan.programs, self.marked)
        super().__init__(f"{message}\n{self.grid}")


def check_plan(plan: Plan, ready_after: Sequence[int] | None = None) -> None:
    """Checks everything but deadlocks; for `ready_after` see `planner.loss_ready_after`.

    Raises:
        PlanError: naming rank, place and action.
    """
    parents = [segment.parents for segment in plan.segments]
    children: list[list[int]] = [[] for _ in parents]
    for index, parent in ((i, parent) for i, above in enumerate(parents) for parent in above):
        children[parent].append(index)
    needs: dict[str, Sequence[Sequence[int]]] = {"F": parents, "B": children}
    for rank in range(plan.num_ranks):
        _check_program(
            plan, rank, needs, [-1] * len(parents) if ready_after is None else ready_after
        )
    if plan.num_ranks > 1:
        for rank, kind in itertools.product(range(plan.num_ranks), STEP):
            _check_link(plan, kind, rank, (rank + STEP[kind]) % plan.num_ranks)


def _check_program(
    plan: Plan, rank: int, needs: Mapping[str, Sequence[Sequence[int]]], ready_after: Sequence[int]
) -> None:
    """`needs`: by kind and segment the segments whose action of that kind comes before."""
    num, num_chunks = len(plan.segments), plan.num_chunks
    scores_on = num_chunks - 1 if rank == plan.num_ranks - 1 else -1
    done: set[tuple[str, int, int, int]] = set()
    reached = 0  # where losses are, the forwards of all segments before this one are done
    for place, action in enumerate(plan.programs[rank]):
        kind, index, chunk, _ = action
        if kind not in needs or not (0 <= index < num and 0 <= chunk < num_chunks):
            what = f"{num} segments and {num_chunks} model chunks a rank, counted from 0"
            fault = f"does not exist: the plan has {what}"
        else:
            fault = _misplaced(action, done, needs[kind][index])
        if kind == "B" and chunk == scores_on and not fault:
            while ("F", reached, chunk, -1) in done:
                reached += 1
            if ready_after[index] >= reached:
                fault = f"needs a loss that takes all forwards up to F{ready_after[index]}"
        if fault:
            raise _error(plan, rank, place, fault)
        done.add(action)
    if len(done) < 2 * num * num_chunks:
        every = itertools.product("FB", range(num_chunks), range(num))
        missing = next(a for a in (Action(k, i, chunk) for k, chunk, i in every) if a not in done)
        end = [(rank, len(plan.programs[rank]))]
        raise PlanError(f"rank {rank} never runs {missing}", plan, end)


def _misplaced(action: Action, done: Set[tuple[str, int, int, int]], needs: Sequence[int]) -> str:
    kind, index, chunk, _ = action
    if action in done:
        return "runs a second time"
    if kind == "B" and ("F", index, chunk, -1) not in done:
        return "runs before its own forward"
    for other in needs:
        if (kind, other, chunk, -1) not in done:
            relative = "forward of its parent" if kind == "F" else "backward of its child"
            return f"runs before the {relative} {other}"
    return ""


def _check_link(plan: Plan, kind: str, source: int, target: int) -> None:
    first = 0 if kind == "F" else plan.num_stages - 1  # which receives nothing
    sent = [plan.receiver(source, action) for action in plan.programs[source] if action[0] == kind]
    expected = [receiver[1] for receiver in sent if receiver is not None]
    received = [
        action
        for action in plan.programs[target]
        if action[0] == kind and plan.stage(target, action[2]) != first
    ]
    for number, (action, taken) in enumerate(zip(expected, received, strict=True)):
        if action != taken:
            text = (
                f"takes message {number} from rank {source}, which sends the one for {action} there"
            )
            raise _error(plan, target, plan.programs[target].index(taken), text)


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
    numbers = ["", *map(str, range(max(lengths, default=0)))]
    columns = [numbers]
    for rank, program in enumerate(programs):
        cells = [f" rank {rank}"]
        for place in range(len(numbers) - 1):
            text = str(program[place]) if place < len(program) else ""
            cells.append(f">{text or 'end'}<" if (rank, place) in marked else f" {text}")
        columns.append(cells)
    widths = [max(map(len, cells)) + 1 for cells in columns]
    bad = {place for _, place in marked}
    lines = []
    for place, (number, *cells) in enumerate(zip(*columns, strict=True), start=-1):
        row = " ".join(map(str.ljust, cells, widths[1:]))
        arrow = "  <-- here" if place in bad else ""
        lines.append(f"{number:>{widths[0] - 1}}  {row}{arrow}".rstrip())
    return "\n".join(lines)
