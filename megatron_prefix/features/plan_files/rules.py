"""The rules that a plan must keep.  Pure.

Every rank runs one F and one B of every segment on each of its model chunks, parents before
children forward, children before parents backward. On the last stage a backward comes after the
forward that completes its losses. Two neighbours agree on the order of their messages, so that each
direction is a FIFO. Deadlocks are found by `walk`. The planner's own plans keep them by the way in
which they are made, so steps check a user's alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set

from megatron_prefix.plan.actions import STEP, Action, Plan
from megatron_prefix.plan.error import PlanError


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
