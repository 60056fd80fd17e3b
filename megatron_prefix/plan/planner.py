"""Segments -> two orders -> one program a rank.  Pure.

F-order is that of the forest; in B-order a segment comes after all that read it, and as soon as it
can. Both are the same on every stage, so messages between two neighbours in one direction are a
FIFO, and no plan made here can deadlock. ("Schedule-Level Shared-Prefix Reuse for LLM RL Training",
section 4.5, reorders phases stage by stage for flat groups; here for any tree.)
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_prefix.plan.actions import STEP, Action, Plan
from megatron_prefix.plan.check import check_plan
from megatron_prefix.plan.walk import first_arrivals, seconds_of, walk
from megatron_prefix.tree import Forest, Segment
from megatron_prefix.tree.forest import Exchange


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
    through = [segment.microbatches(microbatch_of) for segment in forest.segments]
    last = {microbatch: index for index, some in enumerate(through) for microbatch in some}
    if forest.ordered:
        running = itertools.accumulate((last[m] for m in sorted(last)), max)
        last = dict(zip(sorted(last), running, strict=True))
    return [
        max([index, *(last[microbatch] for microbatch in some)]) if segment.scored else index
        for index, (segment, some) in enumerate(zip(forest.segments, through, strict=True))
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

    Plays all ranks and writes down what they do. Each takes its next forward or its next backward,
    whichever can start first, on a tie the forward; it runs ahead of its backwards only as far as
    `run_ahead` and `max_live_positions` allow. Programs that came out of a run cannot deadlock,
    however long actions really take. Some rank can always go on: the one furthest behind in its
    backwards may run all forwards that its next backward needs, on every stage.

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
        max_live_positions: a rank runs no forward ahead that would make it hold more positions (see
            `Plan.peak_positions`). 0: no limit.
    """
    orders = _Orders(
        forest, num_ranks, num_chunks, loss_ready_after(forest, microbatches), group_size
    )
    return orders.merged(run_ahead, max_live_positions)


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
    ready_after = loss_ready_after(forest, microbatches)
    orders = _Orders(forest, num_ranks, num_chunks, ready_after, group_size)
    plans = [with_crossing(orders.merged(run_ahead, 0), forest)]
    if num_ranks == 1:
        return plans[0]
    most = max(plans[0].peak_positions)
    for lookahead in (run_ahead + 4, None):
        plan = with_crossing(orders.merged(lookahead, most), forest)
        if max(plan.peak_positions) <= most:
            plans.append(plan)
    seconds = seconds_of(plans[0])
    best = min(plans, key=lambda plan: walk(plan, seconds))
    check_plan(best, ready_after)
    return best


class _Orders:
    """What all ranks of a forest's plans have in common.

    Attributes:
        actions: by kind in F-order and B-order, segments on model chunks.
        least: per backward the number of forwards that a rank must have run before.
        scored_at: per segment the forward on the last stage that completes its loss.
        positions, times: per segment, and of its "F" and "B" on one model chunk.
        group_size: segments of a chunk in turn.
    """

    def __init__(
        self,
        forest: Forest,
        num_ranks: int,
        num_chunks: int,
        ready_after: Sequence[int],
        group_size: int | None,
    ) -> None:
        self.segments, self.num_ranks, self.num_chunks = forest.segments, num_ranks, num_chunks
        self.group_size = (group_size or num_ranks) if num_chunks > 1 else 1
        chunks, order = range(num_chunks), backward_order(forest.segments, ready_after)
        forwards = chunk_turns(range(len(order)), chunks, self.group_size)
        backwards = chunk_turns(order, chunks[::-1], self.group_size)  # the last chunk first
        self.actions = {
            kind: [Action(kind, *turn) for turn in turns]
            for kind, turns in (("F", forwards), ("B", backwards))
        }
        place = {turn: position for position, turn in enumerate(forwards)}
        self.scored_at = [place[index, num_chunks - 1] for index in ready_after]
        demands = (self.scored_at[index] + 1 for index, _ in backwards)
        self.least = list(itertools.accumulate(demands, max))
        self.positions = [one.padded_length if one.source < 0 else 0 for one in forest.segments]
        self.times = {
            kind: [positions * passes / num_chunks for positions in self.positions]
            for kind, passes in (("F", 1), ("B", 2))
        }

    def merged(self, run_ahead: int | None, max_live_positions: int) -> Plan:
        """See `make_plan`."""
        programs = _Merge(self, run_ahead, max_live_positions).run()
        return Plan(self.segments, programs, self.num_chunks)


class _Merge:
    """Plays all ranks and writes their programs down."""

    def __init__(self, orders: _Orders, run_ahead: int | None, max_live_positions: int) -> None:
        num_ranks, num_chunks = orders.num_ranks, orders.num_chunks
        self.orders, self.num_actions = orders, len(orders.actions["F"])
        # A position on one of v model chunks counts 1/v, as in `Plan.peak_positions`.
        self.limit = max_live_positions * num_chunks or math.inf
        # Forwards before the first backward in Megatron's schedule; a rank stays as many ahead.
        self.warm_up = (num_chunks - 1) * orders.group_size + 1 if run_ahead != 0 else 0
        behind = range(num_ranks - 1, -1, -1)  # stages after each rank's own
        self.lookahead = [
            self.num_actions if run_ahead is None else run_ahead * stages for stages in behind
        ]
        self.arrivals = first_arrivals(num_ranks * num_chunks, [math.inf] * len(orders.positions))
        self.clock, self.live = [0.0] * num_ranks, [0] * num_ranks
        self.done = {kind: [0] * num_ranks for kind in STEP}
        self.programs: list[list[Action]] = [[] for _ in range(num_ranks)]

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """Runs the rank that can start first, until none can."""
        num_ranks = self.orders.num_ranks
        choices = [self._choice(rank) for rank in range(num_ranks)]
        while (choice := min(choices))[0] < math.inf:
            start, is_backward, rank = choice
            neighbour = self._take("FB"[is_backward], rank, start) % num_ranks
            choices[rank] = self._choice(rank)
            if neighbour != rank:
                choices[neighbour] = self._choice(neighbour)
        if any(len(program) < 2 * self.num_actions for program in self.programs):
            raise RuntimeError("no rank can go on: the planner's rule is broken")
        return tuple(map(tuple, self.programs))

    def _choice(self, rank: int) -> tuple[float, bool, int]:
        """(start, whether it is a backward, rank) of a rank's next action; infinity: it waits."""
        orders, clock, forward, backward = self.orders, self.clock[rank], math.inf, math.inf
        num_forwards, num_backwards = self.done["F"][rank], self.done["B"][rank]
        if num_forwards < self.num_actions:
            _, index, chunk, _ = orders.actions["F"][num_forwards]
            must = orders.least[num_backwards]
            may = max(must, self.warm_up + num_backwards) + self.lookahead[rank]
            fits = self.live[rank] + orders.positions[index] <= self.limit
            if num_forwards < must or (num_forwards < may and fits):
                forward = self.arrivals["F"][chunk * orders.num_ranks + rank][index]
        if num_backwards < self.num_actions:
            _, index, chunk, _ = orders.actions["B"][num_backwards]
            stage = chunk * orders.num_ranks + rank
            is_last = stage == orders.num_ranks * orders.num_chunks - 1
            if not is_last or num_forwards > orders.scored_at[index]:
                backward = self.arrivals["B"][stage][index]
        start = clock if backward < clock else backward
        if forward <= start:
            return (clock if forward < clock else forward), False, rank
        return start, True, rank

    def _take(self, kind: str, rank: int, start: float) -> int:
        """Runs a rank's next action of a kind; returns the stage that its message goes to."""
        orders, done = self.orders, self.done[kind]
        action = orders.actions[kind][done[rank]]
        index = action.segment
        done[rank] += 1
        self.live[rank] += STEP[kind] * orders.positions[index]
        self.clock[rank] = end = start + orders.times[kind][index]
        self.programs[rank].append(action)
        stage = action.chunk * orders.num_ranks + rank + STEP[kind]
        if 0 <= stage < orders.num_ranks * orders.num_chunks:
            self.arrivals[kind][stage][index] = end
        return stage


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

    def place(exchange: Exchange) -> tuple[int, bool]:
        """In a level what a rank computes, then what it receives; backward the other way round."""
        return exchange.level, forest.segments[exchange.segment].source >= 0

    levels = sorted(forest.exchanges, key=place)
    chunks, crossing = range(plan.num_chunks), {exchange.segment for exchange in levels}
    begin = [Action("F", exchange.segment, chunk) for chunk in chunks for exchange in levels]
    end = [
        Action("B", exchange.segment, chunk) for chunk in chunks[::-1] for exchange in levels[::-1]
    ]
    programs = (
        (*begin, *(action for action in program if action.segment not in crossing), *end)
        for program in plan.programs
    )
    return replace(plan, programs=tuple(programs))
