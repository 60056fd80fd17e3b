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
import operator
from collections.abc import Sequence
from dataclasses import replace

from megatron_prefix.plan.actions import STEP, Action, Plan
from megatron_prefix.plan.walk import first_arrivals, seconds_of, walk
from megatron_prefix.tree import Forest, Segment
from megatron_prefix.tree.forest import Exchange


def backward_order(
    segments: Sequence[Segment], ready_after: Sequence[int] | None = None
) -> list[int]:
    """B-order: segments as their losses are ready, and an inner one right after its last reader.

    For trees that are walked depth first it is their postorder; F-order is their preorder.
    `ready_after` is that of `loss_ready_after` (default: a wave is ready after its own forward).
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
    their children, and every rollout ends in a scored segment. `microbatches`: of each rollout the
    trainer's (default: one rollout each).
    """
    microbatch_of = range(len(forest.num_positions)) if microbatches is None else microbatches
    through = [segment.microbatches(microbatch_of) for segment in forest.segments]
    last = {microbatch: index for index, numbers in enumerate(through) for microbatch in numbers}
    if forest.ordered:
        running = itertools.accumulate((last[m] for m in sorted(last)), max)
        last = dict(zip(sorted(last), running, strict=True))
    return [
        max([index, *(last[microbatch] for microbatch in numbers)]) if segment.scored else index
        for index, (segment, numbers) in enumerate(zip(forest.segments, through, strict=True))
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
    run_ahead: float | None = 2,
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
        forest: of the step.
        num_ranks, num_chunks: of the pipeline, and model chunks a rank (virtual stages).
        microbatches: see `loss_ready_after`.
        run_ahead: forwards that a stage runs ahead of its successor, beyond those that its next
            backward needs. More hides uneven segments, less holds less memory; below 1 only some
            stages do. 0: only what is needed, without Megatron's warm-up of virtual stages. None:
            as many as `max_live_positions` allows.
        group_size: Megatron's microbatch_group_size_per_vp_stage; default: the pipeline size.
        max_live_positions: a rank runs no forward ahead that would make it hold more positions (see
            `Plan.peak_positions`). 0: no limit.
    """
    ready_after = loss_ready_after(forest, microbatches)
    merge = _Merge(forest, num_ranks, num_chunks, ready_after, group_size)
    return merge.plan(run_ahead, max_live_positions)


def best_plan(
    forest: Forest,
    num_ranks: int = 1,
    *,
    num_chunks: int = 1,
    microbatches: Sequence[int] | None = None,
    run_ahead: float = 2,
    group_size: int | None = None,
) -> Plan:
    """The shortest of three plans that hold no more positions than `make_plan` with `run_ahead`.

    The others run further ahead, but only into the memory that `run_ahead` needs at its peak. That
    shortens most steps, those with virtual stages most; which one is best depends on the trees.
    """
    ready_after = loss_ready_after(forest, microbatches)
    merge = _Merge(forest, num_ranks, num_chunks, ready_after, group_size)

    def planned(lookahead: float | None, most: int = 0) -> tuple[Plan, float]:
        plan = merge.plan(lookahead, most)
        crossing = with_crossing(plan, forest)
        return crossing, merge.end if crossing is plan else walk(crossing, seconds_of(plan))

    plans = [planned(run_ahead)]
    first = plans[0][0]
    if num_ranks == 1:
        return first
    most = max(first.peak_positions)
    tried = (planned(lookahead, most) for lookahead in (run_ahead + 4, None))
    plans += [entry for entry in tried if max(entry[0].peak_positions) <= most]
    return min(plans, key=operator.itemgetter(1))[0]


class _Merge:
    """Plays all ranks of a forest and writes their programs down.

    Attributes:
        end: when the last plan ends.
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
        turns = {"F": forwards, "B": backwards}
        # By kind in F-order and B-order, segments on model chunks.
        self.actions = {kind: [Action(kind, *turn) for turn in turns[kind]] for kind in turns}
        place = {turn: position for position, turn in enumerate(forwards)}
        # Per segment the forward on the last stage that completes its loss.
        self.scored_at = [place[index, num_chunks - 1] for index in ready_after]
        # Per backward the number of forwards that a rank must have run before.
        demands = (self.scored_at[index] + 1 for index, _ in backwards)
        self.least = list(itertools.accumulate(demands, max))
        self.positions = [0 if s.source >= 0 else s.padded_length for s in forest.segments]
        self.times = {
            kind: [positions * passes / num_chunks for positions in self.positions]
            for kind, passes in (("F", 1), ("B", 2))
        }

    def plan(self, run_ahead: float | None, max_live_positions: int = 0) -> Plan:
        """Runs the rank that can start first, until none can; see `make_plan`."""
        num_ranks, num_actions = self.num_ranks, len(self.actions["F"])
        # A position on one of v model chunks counts 1/v, as in `Plan.peak_positions`.
        self._limit = max_live_positions * self.num_chunks or math.inf
        # Forwards before the first backward in Megatron's schedule; a rank stays as many ahead.
        self._warm_up = (self.num_chunks - 1) * self.group_size + 1 if run_ahead != 0 else 0
        behind = range(num_ranks - 1, -1, -1)  # stages after each rank's own
        self._ahead = [num_actions if run_ahead is None else int(run_ahead * n) for n in behind]
        num_stages, never = num_ranks * self.num_chunks, [math.inf] * len(self.positions)
        self._arrivals = first_arrivals(num_stages, never)
        self._clock, self._live = [0.0] * num_ranks, [0] * num_ranks
        self._done = {kind: [0] * num_ranks for kind in STEP}
        programs: list[list[Action]] = [[] for _ in range(num_ranks)]
        choices = [self._choice(rank) for rank in range(num_ranks)]
        queue = sorted(choices)
        while (choice := heapq.heappop(queue))[0] < math.inf:
            start, is_backward, rank = choice
            if choice != choices[rank]:  # out of date
                continue
            action = self.actions["FB"[is_backward]][self._done["FB"[is_backward]][rank]]
            programs[rank].append(action)
            for concerned in {rank, self._run(action, rank, start) % num_ranks}:
                choice = self._choice(concerned)
                if concerned == rank or choice != choices[concerned]:
                    choices[concerned] = choice
                    heapq.heappush(queue, choice)
        self.end = max(self._clock)
        if any(len(program) < 2 * num_actions for program in programs):
            raise RuntimeError("no rank can go on: the planner's rule is broken")
        return Plan(self.segments, tuple(map(tuple, programs)), self.num_chunks)

    def _choice(self, rank: int) -> tuple[float, bool, int]:
        """(start, whether it is a backward, rank) of a rank's next action; infinity: it waits."""
        clock, forward, backward = self._clock[rank], math.inf, math.inf
        num_forwards, num_backwards = self._done["F"][rank], self._done["B"][rank]
        if num_forwards < len(self.actions["F"]):
            _, index, chunk, _ = self.actions["F"][num_forwards]
            must = self.least[num_backwards]
            may = max(must, self._warm_up + num_backwards) + self._ahead[rank]
            fits = self._live[rank] + self.positions[index] <= self._limit
            if num_forwards < must or (num_forwards < may and fits):
                forward = self._arrivals["F"][chunk * self.num_ranks + rank][index]
        if num_backwards < len(self.actions["B"]):
            _, index, chunk, _ = self.actions["B"][num_backwards]
            stage = chunk * self.num_ranks + rank
            has_loss = num_forwards > self.scored_at[index]
            if has_loss or stage < self.num_ranks * self.num_chunks - 1:
                backward = self._arrivals["B"][stage][index]
        start = clock if backward < clock else backward
        if forward <= start:
            return (clock if forward < clock else forward), False, rank
        return start, True, rank

    def _run(self, action: Action, rank: int, start: float) -> int:
        """Returns the stage that its message goes to."""
        kind, index, chunk, _ = action
        self._done[kind][rank] += 1
        self._live[rank] += STEP[kind] * self.positions[index]
        self._clock[rank] = end = start + self.times[kind][index]
        stage = chunk * self.num_ranks + rank + STEP[kind]
        if 0 <= stage < self.num_ranks * self.num_chunks:
            self._arrivals[kind][stage][index] = end
        return stage


# What crosses data-parallel ranks -----------------------------------------------------------------


def with_crossing(plan: Plan, forest: Forest) -> Plan:
    """A plan whose exchanges between data-parallel ranks come at the begin and end of the step.

    A received segment has an F, which receives its payload, and a B, which returns its gradients.
    The F of a segment that others read also sends its payload, and its B first receives their
    gradients. All ranks have one order: payloads level by level of the trees, local segments,
    gradients level by level; model chunks forward from the first, backward from the last. A level
    crosses at once, forward when a rank has computed its own segments of it, backward before it
    needs gradients from others. Everything that an exchange waits for comes before it on every
    rank, so no ranks wait in a circle, even if every exchange blocks both of its ranks.
    """
    if not forest.exchanges:
        return plan

    # In a level what a rank computes, then what it receives; backward the other way round.
    def place(exchange: Exchange) -> tuple[int, bool]:
        return exchange.depth, forest.segments[exchange.segment].source >= 0

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
