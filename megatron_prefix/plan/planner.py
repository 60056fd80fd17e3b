"""Segments -> two orders -> one program a rank.  Pure.

F-order is that of the forest; in B-order a segment comes after all that read it, and as soon as it
can. Both are the same on every stage, so messages between two neighbours in one direction are a
FIFO, and no plan made here can deadlock. ("Schedule-Level Shared-Prefix Reuse for LLM RL Training",
section 4.5, reorders phases stage by stage for flat groups; here for any tree.)
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_prefix.plan.actions import Action, Plan
from megatron_prefix.plan.simulator import simulate
from megatron_prefix.tree import Forest, Segment


def backward_order(
    segments: Sequence[Segment], ready_after: Sequence[int] | None = None
) -> list[int]:
    """B-order: segments as their losses are ready, and an inner one right after its last reader.

    For trees that are walked depth first it is their postorder; F-order is their preorder.

    Args:
        segments: in F-order.
        ready_after: see `loss_ready_after` (default: every wave is ready after its own forward).
    """
    ready_after = range(len(segments)) if ready_after is None else ready_after
    parents = [segment.parents for segment in segments]
    readers = [0] * len(segments)
    for parent in itertools.chain.from_iterable(parents):
        readers[parent] += 1
    # A parent before waves that are ready as early; among parents the deepest first.
    todo = [(ready_after[i], 1, i, i) for i, waits in enumerate(readers) if not waits]
    heapq.heapify(todo)
    order: list[int] = []
    while todo:
        index = heapq.heappop(todo)[-1]
        order.append(index)
        for parent in parents[index]:
            readers[parent] -= 1
            if not readers[parent]:
                heapq.heappush(todo, (ready_after[parent], 0, -parent, parent))
    return order


def loss_ready_after(forest: Forest, microbatches: Sequence[int] | None = None) -> list[int]:
    """Per segment the last forward (in F-order) that its backward needs.

    A microbatch has its loss when the last segment of its last rollout has run forward; every
    scored segment of these rollouts waits for that. In an `ordered` forest it also waits for all
    microbatches before. Segments without loss need no rule: their backward comes after those of
    their children, and every rollout ends in a scored segment.

    Args:
        forest: the step's segments.
        microbatches: the trainer's microbatch of each rollout (default: one rollout each).
    """
    microbatch_of = range(len(forest.num_positions)) if microbatches is None else microbatches
    owners = [
        {microbatch_of[rollout] for span in segment.spans for rollout in span.rollouts}
        for segment in forest.segments
    ]
    last = {
        microbatch: index
        for index, microbatches_of in enumerate(owners)
        for microbatch in microbatches_of
    }
    if forest.ordered:
        running = itertools.accumulate((last[m] for m in sorted(last)), max)
        last = dict(zip(sorted(last), running, strict=True))
    return [
        max([index, *(last[microbatch] for microbatch in microbatches_of)])
        if segment.scored
        else index
        for index, (segment, microbatches_of) in enumerate(
            zip(forest.segments, owners, strict=True)
        )
    ]


def chunk_turns(
    order: Sequence[int], chunks: Sequence[int], group_size: int
) -> list[tuple[int, int]]:
    """(segment, model chunk) in order, `group_size` segments of a chunk at a time.

    Megatron's order with virtual stages (`get_schedule_table` in
    megatron/core/pipeline_parallel/schedules.py); with one model chunk it is that of the segments.
    """
    return [
        (segment, chunk)
        for begin in range(0, len(order), group_size)
        for chunk in chunks
        for segment in order[begin : begin + group_size]
    ]


def make_plan(
    forest: Forest,
    num_ranks: int = 1,
    *,
    num_chunks: int = 1,
    microbatches: Sequence[int] | None = None,
    run_ahead: int | None = 2,
    group_size: int | None = None,
    max_live_positions: int = 0,
) -> Plan:
    """The program of every rank: warm-up, one backward one forward, drain.

    Simulates all ranks and writes down what they do. A forward takes its positions as time, a
    backward twice that. Each rank takes its next forward or its next backward, whichever can start
    first, on a tie the forward; it runs ahead of its backwards only as far as `run_ahead` and
    `max_live_positions` allow. Programs that came out of a run cannot deadlock, however long
    actions really take. Some rank can always go on: the one furthest behind in its backwards may
    run all forwards that its next backward needs, on every stage.

    Args:
        forest: the step's segments.
        num_ranks: pipeline size.
        num_chunks: model chunks a rank (virtual stages).
        microbatches: see `loss_ready_after`.
        run_ahead: forwards that a stage runs ahead of its successor, beyond those that its next
            backward needs. More hides uneven segments, less holds less memory. 0: only what is
            needed, without Megatron's warm-up of virtual stages. None: as many as
            `max_live_positions` allows.
        group_size: Megatron's microbatch_group_size_per_vp_stage; default: the pipeline size.
        max_live_positions: a rank runs no forward ahead that would make it hold more positions for
            backward (over all its model chunks; one on one of v counts 1/v). 0: no limit.
    """
    size = (group_size or num_ranks) if num_chunks > 1 else 1
    ready_after = loss_ready_after(forest, microbatches)
    chunks, order = range(num_chunks), backward_order(forest.segments, ready_after)
    forwards = chunk_turns(range(len(forest.segments)), chunks, size)
    backwards = chunk_turns(order, chunks[::-1], size)  # the last model chunk first
    place = {item: position for position, item in enumerate(forwards)}
    demands = (place[ready_after[segment], num_chunks - 1] + 1 for segment, _ in backwards)
    orders = _Orders(
        forwards, backwards, list(itertools.accumulate(demands, max)),
        (num_chunks - 1) * size + 1 if run_ahead != 0 else 0,
        [place[index, num_chunks - 1] for index in ready_after],
        [segment.padded_length if segment.source < 0 else 0 for segment in forest.segments],
        num_ranks, num_chunks,
    )  # fmt: skip
    programs = _Merge(orders, run_ahead, max_live_positions).run()
    return Plan(forest.segments, programs, num_chunks)


def best_plan(
    forest: Forest,
    num_ranks: int = 1,
    *,
    num_chunks: int = 1,
    microbatches: Sequence[int] | None = None,
    run_ahead: int = 2,
    group_size: int | None = None,
) -> Plan:
    """The shortest of three plans that hold no more positions than `make_plan` with `run_ahead`.

    The others run further ahead, but only into the memory that `run_ahead` needs at its peak, be it
    0. That shortens most steps, those with virtual stages most; which one is best depends on the
    trees.
    """

    def made(lookahead: int | None, most: int) -> Plan:
        plan = make_plan(
            forest, num_ranks, num_chunks=num_chunks, microbatches=microbatches,
            run_ahead=lookahead, group_size=group_size, max_live_positions=most,
        )  # fmt: skip
        return with_crossing(plan, forest)

    first = made(run_ahead, 0)
    if num_ranks == 1:
        return first
    ready_after = loss_ready_after(forest, microbatches)
    base = simulate(first, ready_after=ready_after)
    tried = [(base.makespan, 0, first)]
    for number, lookahead in enumerate((run_ahead + 4, None), start=1):
        plan = made(lookahead, base.peak_live_positions)
        timeline = simulate(plan, ready_after=ready_after)
        if timeline.peak_live_positions <= base.peak_live_positions:
            tried.append((timeline.makespan, number, plan))
    return min(tried, key=lambda item: item[:2])[2]


class _Orders(NamedTuple):
    """What all ranks of a plan have in common.

    Attributes:
        forwards, backwards: (segment, model chunk) in F-order and B-order.
        least: per backward the number of forwards that a rank must have run before.
        warm_up: forwards that a rank runs before its first backward in Megatron's schedule; it
            stays as many ahead, as far as memory allows.
        scored_at: per segment the forward on the last stage that completes its loss.
        positions: per segment.
        num_ranks, num_chunks: the pipeline.
    """

    forwards: list[tuple[int, int]]
    backwards: list[tuple[int, int]]
    least: list[int]
    warm_up: int
    scored_at: list[int]
    positions: list[int]
    num_ranks: int
    num_chunks: int


class _Merge:
    """Simulates all ranks and writes their programs down."""

    def __init__(self, orders: _Orders, run_ahead: int | None, max_live_positions: int) -> None:
        # A position on one of v model chunks counts 1/v, as in the simulator.
        self.orders, self.max_live_positions = orders, max_live_positions * orders.num_chunks
        ranks = range(orders.num_ranks)
        behind = range(orders.num_ranks - 1, -1, -1)  # stages after each rank's own
        most = len(orders.forwards)
        self.lookahead = [most if run_ahead is None else run_ahead * stages for stages in behind]
        self.clock = [0.0] * orders.num_ranks
        self.live = [0] * orders.num_ranks
        self.done = {kind: [0] * orders.num_ranks for kind in "FB"}
        # When a stage has finished a segment; its neighbour can start then.
        self.finished: dict[tuple[str, int, int], float] = {}
        self.programs: list[list[Action]] = [[] for _ in ranks]

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """Runs the rank that can start first, until all backwards are done."""
        choices = [self._choice(rank) for rank in range(self.orders.num_ranks)]
        for _ in range(2 * self.orders.num_ranks * len(self.orders.forwards)):
            ready = [(choice, rank) for rank, choice in enumerate(choices) if choice is not None]
            if not ready:
                raise RuntimeError("no rank can go on: the planner's rule is broken")
            (start, _, kind), rank = min(ready)
            self._take(rank, kind, start)
            neighbour = (rank + (1 if kind == "F" else -1)) % self.orders.num_ranks
            for changed in {rank, neighbour}:
                choices[changed] = self._choice(changed)
        return tuple(map(tuple, self.programs))

    def _choice(self, rank: int) -> tuple[float, int, str] | None:
        """(start, preference, kind) of the rank's next action; None: it must wait."""
        clock = self.clock[rank]
        forward, backward = self._forward_ready(rank), self._backward_ready(rank)
        if forward is not None and (backward is None or forward <= max(clock, backward)):
            return max(clock, forward), 0, "F"
        return None if backward is None else (max(clock, backward), 1, "B")

    def _forward_ready(self, rank: int) -> float | None:
        orders, position = self.orders, self.done["F"][rank]
        if position == len(orders.forwards):
            return None
        index, chunk = orders.forwards[position]
        backwards = self.done["B"][rank]
        must = orders.least[backwards]
        limit = max(must, orders.warm_up + backwards) + self.lookahead[rank]
        too_many = 0 < self.max_live_positions < self.live[rank] + orders.positions[index]
        if position >= must and (position >= limit or too_many):
            return None
        stage = chunk * orders.num_ranks + rank
        return 0.0 if stage == 0 else self.finished.get(("F", stage - 1, index))

    def _backward_ready(self, rank: int) -> float | None:
        orders, position = self.orders, self.done["B"][rank]
        if position == len(orders.backwards):
            return None
        index, chunk = orders.backwards[position]
        stage = chunk * orders.num_ranks + rank
        if stage < orders.num_ranks * orders.num_chunks - 1:
            return self.finished.get(("B", stage + 1, index))
        return 0.0 if self.done["F"][rank] > orders.scored_at[index] else None

    def _take(self, rank: int, kind: str, start: float) -> None:
        orders = self.orders
        items = orders.forwards if kind == "F" else orders.backwards
        index, chunk = items[self.done[kind][rank]]
        self.done[kind][rank] += 1
        positions = orders.positions[index]
        self.live[rank] += positions if kind == "F" else -positions
        end = start + positions * (1 if kind == "F" else 2) / orders.num_chunks
        self.clock[rank] = end
        self.finished[kind, chunk * orders.num_ranks + rank, index] = end
        self.programs[rank].append(Action(kind, index, chunk))


# What crosses data-parallel ranks -----------------------------------------------------------------


def with_crossing(plan: Plan, forest: Forest) -> Plan:
    """A plan whose exchanges between data-parallel ranks come at the begin and end of the step.

    A received segment has an F, which receives its payload, and a B, which returns its gradients.
    The F of a segment that others read also sends its payload, and its B first receives their
    gradients. All ranks have one order: payloads level by level of the trees, local segments,
    gradients level by level. A level crosses at once, forward after a rank has computed its own
    segments of it, backward before it needs gradients from others, so the owned segments of a level
    run on all ranks at the same time. Everything that an exchange waits for comes before it on
    every rank, so no ranks wait in a circle, even if every exchange blocks both of its ranks.
    Several model chunks exchange chunk by chunk, forward from the first, backward from the last.

    Args:
        plan: runs segments in F-order, and a segment's backward after that of its readers.
        forest: its segments.
    """
    if not forest.exchanges:
        return plan
    chunks = range(plan.num_chunks)
    crossing = {exchange.segment for exchange in forest.exchanges}
    # In a level what a rank computes, then what it receives; backward the other way round.
    source = {index: segment.source for index, segment in enumerate(forest.segments)}
    levels = sorted(
        forest.exchanges, key=lambda exchange: (exchange.level, source[exchange.segment] >= 0)
    )
    begin = [Action("F", exchange.segment, chunk) for chunk in chunks for exchange in levels]
    levels = [*reversed(forest.exchanges)]
    levels.sort(key=lambda exchange: (-exchange.level, source[exchange.segment] < 0))
    end = [
        Action("B", exchange.segment, chunk) for chunk in reversed(chunks) for exchange in levels
    ]
    programs = (
        (*begin, *(action for action in program if action.segment not in crossing), *end)
        for program in plan.programs
    )
    return replace(plan, programs=tuple(programs))
