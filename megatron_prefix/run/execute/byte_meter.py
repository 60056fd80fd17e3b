"""Measures how many bytes of device memory a position takes, by the allocator's own counters.

They are read around every forward of a segment, or around every model call of Megatron's schedule,
and before and after the step: in the first steps with gradients, and then in one of 50. That waits
for nothing. At the end of such a step ranks tell one another what they have counted, so that all
plan with the same numbers: of each stage those of the rank that has most.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_prefix.device import memory
from megatron_prefix.device.memory import Peaks
from megatron_prefix.plan.actions import ON_DEVICE, Action, Plan
from megatron_prefix.plan.cost import AGAIN
from megatron_prefix.plan.cost_file import Numbers
from megatron_prefix.plan.cost_fit import non_negative
from megatron_prefix.plan.memory import Footprint, StageBytes, least_moment
from megatron_prefix.run.agreement import all_say
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.request import Request

FIRST, EVERY = 5, 50
"""Steps with gradients that are measured: so many at first, and then every so many."""
LAYERS_AT_ONCE, LAYERS_MADE_AGAIN = 2, 20
"""While nothing is known of what an action has for its duration: what so many layers keep. A layer
that Megatron recomputes keeps its input, and makes about so many times as much."""
_RIDGE = np.array([1e-12, 1e-12, 1e-9, 1e-6])
"""What came in one proportion with a segment's positions counts as theirs."""
BITS = 8
"""Of a number: choices do not change with every byte."""


class StageCount(NamedTuple):
    """Segments of one stage in one step.

    Attributes:
        rows: positions of an inner segment, of a wave, those with loss, and spans with a parent.
        sizes: bytes that each has kept.
    """

    rows: list[tuple[float, float, float, float]]
    sizes: list[float]

    def numbers(self) -> StageBytes:
        """What fits the forwards best; none of the numbers is below 0. A kind of segment that did
        not run keeps as much as the other."""
        rows, sizes = np.array(self.rows, float).reshape(-1, 4), np.array(self.sizes)
        used = np.asarray(rows.any(axis=0))
        if not used.any():
            return StageBytes()
        columns = rows[:, used] / rows[:, used].max(0)
        gram = columns.T @ columns
        gram += np.trace(gram) * np.diag(_RIDGE[used])
        solved = np.zeros(4)
        solved[used] = non_negative(gram, columns.T @ sizes) / rows[:, used].max(0)
        inner, wave, scored, span = map(float, solved)
        return StageBytes(inner if used[0] else wave, wave if used[1] else inner, scored, span)


class SegmentBytes:
    """What forwards of segments leave allocated on one rank, in one step of the prefix schedule.

    Attributes:
        stages: by number.
        gathers: whether the rank keeps K/V of all context-parallel ranks.
        before: allocated when the first action began; None: none has.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank, self._act = rank, rank.act
        self.begin((), gathers=False)

    def begin(self, caches: Sequence[Any], *, gathers: bool) -> None:
        """Begins an attempt, in which these sidecars grow."""
        self._caches, self.gathers = caches, gathers
        self.before: float | None = None
        self.stages: dict[int, StageCount] = {}
        self._again: set[Action] = set()

    def _allocated(self) -> float:
        arenas = sum(cache.device_bytes.held for cache in self._caches)
        return memory.peaks(self._rank.device).used - float(arenas)

    @contextlib.contextmanager
    def counting(self, plan: Plan, action: Action) -> Iterator[None]:
        """Around the computation of an action. Of a wave counts what its forward leaves; of an
        inner segment what the forward that a backward runs again does, or else what the backward
        frees: a step's first forward may leave more than a segment's tensors (quantised weights).
        """
        if self.before is None:
            self.before = memory.peaks(self._rank.device).used
        segment, policy = plan.segments[action.segment], plan.policy(action.segment)
        runs_again = policy == "recompute" and action.kind == "B" and action not in self._again
        is_counted = policy in ON_DEVICE and segment.inner == (action.kind == "B")
        if not (runs_again or is_counted):
            yield
            return
        self._again.add(action)
        allocated = self._allocated()
        yield
        size = (self._allocated() - allocated) * (1 if runs_again or not segment.inner else -1)
        positions = segment.padded_length / self._rank.groups.cp.size()
        size += self._act * positions * (not runs_again and policy in AGAIN)
        row = (
            positions * segment.inner, positions * (not segment.inner),
            min(positions, segment.num_read), sum(s.parent is not None for s in segment.spans),
        )  # fmt: skip
        count = self.stages.setdefault(
            plan.stage(self._rank.stage, action.chunk), StageCount([], [])
        )
        count.rows.append(row)
        count.sizes.append(size)


class CallBytes:
    """What model calls of Megatron's schedule leave allocated on one rank, in one step."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._positions: list[list[float]] = [[] for _ in rank.models]
        self._sizes: list[list[float]] = [[] for _ in rank.models]

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Around the step."""
        with contextlib.ExitStack() as stack:
            for chunk, model in enumerate(self._rank.language_models):
                self._watch(model, chunk, stack)
            yield

    def _watch(self, model: Any, chunk: int, stack: contextlib.ExitStack) -> None:
        ranks, device = self._rank.model.sequence_ranks, self._rank.device
        call: list[float] = []  # allocated before it, and positions

        def begun(*_: Any) -> None:
            call[:] = [memory.peaks(device).used] if torch.is_grad_enabled() else []

        def decoded(_: Any, __: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if len(call) == 1:
                call.append(float(hidden.shape[0] * hidden.shape[1] * ranks))

        def ended(*_: Any) -> None:
            if len(call) == 2:  # else it is beside the microbatch's own, without gradients
                self._sizes[chunk].append(memory.peaks(device).used - call[0])
                self._positions[chunk].append(call[1])
            call.clear()

        stack.callback(model.register_forward_pre_hook(begun).remove)
        stack.callback(model.decoder.register_forward_hook(decoded).remove)
        stack.callback(model.register_forward_hook(ended).remove)

    def numbers(self, before: Peaks, after: Peaks, known: dict[int, StageBytes]) -> dict[int, Any]:
        """By stage; `known` before the step."""
        rank, stages = self._rank, {}
        for chunk, (positions, sizes) in enumerate(zip(self._positions, self._sizes, strict=True)):
            if not positions:
                continue
            a_position = max(0.0, float(np.median(np.array(sizes) / np.array(positions))))
            stage, longest = rank.num_stages * chunk + rank.stage, sorted(positions)[::-1]
            bound = math.inf
            if len(rank.models) == 1:
                held = a_position * sum(longest[: rank.num_stages - rank.stage])
                bound = max(0.0, (after.allocated - before.used - held) / longest[0])
            numbers = StageBytes(a_position, a_position)
            stages[stage] = with_moment(numbers, bound, before, after, known.get(stage), rank)
        return stages


def with_moment(
    numbers: StageBytes,
    bound: float,
    before: Peaks,
    after: Peaks,
    known: StageBytes | None,
    rank: Rank,
) -> StageBytes:
    """Of a stage, with what actions have for their duration: so much as the new maximum of the
    allocator says. An old one is only a bound, for what was known, or is guessed."""
    layers = LAYERS_AT_ONCE + LAYERS_MADE_AGAIN * bool(rank.config.recompute_granularity)
    guess = layers * numbers.wave / rank.layers if known is None else known.moment
    has_moved = after.allocated > before.allocated and bound < math.inf
    return numbers._replace(moment=bound if has_moved else min(bound, guess))


class ByteMeter:
    """What positions of one model take in one layout; ranks that meet have the same numbers.

    Attributes:
        numbers: measured, or read from the user's file.
        overheads: bytes reserved of the device for an allocated one, by schedule; 0: not known.
        counts: whether the device's allocator counts.
    """

    def __init__(self, rank: Rank) -> None:
        self.counts = memory.counts_bytes(rank.device)
        self.numbers: Numbers = {False: {}, True: {}}
        self._local: Numbers = {False: {}, True: {}}
        self.overheads = {False: 0.0, True: 0.0}

    @property
    def is_known(self) -> bool:
        return any(self.numbers.values())

    @property
    def overhead(self) -> float:
        """What our steps reserve of the device for an allocated byte, over what Megatron's do; at
        least 1, until both are known as well."""
        stock, ours = self.overheads[False], self.overheads[True]
        return max(1.0, ours / stock) if stock and ours else 1.0

    def footprint(self, rank: Rank, *, gathers: bool, stock: bool = False) -> Footprint:
        """Bytes of a model on the ranks of a pipeline.

        Args:
            gathers: whether a rank keeps K/V of all context-parallel ranks.
            stock: of Megatron's schedule. While one schedule was never measured, its numbers are
                the other's.
        """
        numbers = self.numbers[not stock] or self.numbers[stock]
        if stock and not self.numbers[False]:
            numbers = {stage: n._replace(inner=n.wave) for stage, n in numbers.items()}
        payloads = rank.payloads
        stages = tuple(numbers.get(stage, StageBytes()) for stage in range(len(payloads)))
        config, parts = rank.config, rank.groups.cp.size()
        size = config.params_dtype.itemsize
        return Footprint(
            stages, payloads, config.hidden_size / rank.model.sequence_ranks * size, rank.layers,
            parts, 1 if gathers else parts, rank.act,
            state=config.hidden_size * size, state_grad=config.hidden_size * max(4, size),
        )  # fmt: skip

    def load(self, numbers: Numbers) -> None:
        """Takes what an earlier run has measured."""
        self.numbers = numbers

    def begin(self, groups: Sequence[Any]) -> None:
        """Before the first step with gradients that may be shared; all ranks of the groups call
        this."""
        if self.counts:
            self.tell(groups)

    def is_due(self, number: int) -> bool:
        """Whether the step of a number, from 1, is measured; the same on all ranks."""
        return self.counts and (number <= FIRST or number % EVERY == 0)

    @contextlib.contextmanager
    def watching(self, rank: Rank) -> Iterator[None]:
        """Around a step of Megatron's schedule before any is shared: no other rank is told yet."""
        if not self.counts:
            yield
            return
        calls, before = CallBytes(rank), memory.peaks(rank.device)
        with calls.counting():
            yield
        after = memory.peaks(rank.device)
        self._local[False] |= calls.numbers(
            before, after, {**self.numbers[True], **self.numbers[False]}
        )

    @contextlib.contextmanager
    def step(
        self, report: Any, request: Request, groups: Sequence[Any], number: int
    ) -> Iterator[None]:
        """Around the step of a number, whichever schedule runs it; all ranks of the groups enter
        it. `report`: a StepReport, which gets a counter."""
        rank = request.rank
        if rank.forward_only or not self.is_due(number):
            yield
            return
        calls, before = CallBytes(rank), memory.peaks(rank.device)
        report.counter = SegmentBytes(rank)
        with calls.counting() if not report.decision.share else contextlib.nullcontext():
            yield
        after, share = memory.peaks(rank.device), report.decision.share
        if not share:
            self._local[False] |= calls.numbers(
                before, after, {**self.numbers[True], **self.numbers[False]}
            )
        elif not (report.retried or any(part.holds_memory for part in request.parts)):
            self._local[True] |= self._of_segments(report, request, before, after)
        overhead = {False: 0.0, True: 0.0}
        if after.allocated > before.allocated and after.reserved > before.reserved:
            overhead[share] = after.reserved / after.allocated
        self.tell(groups, overhead)

    def tell(self, groups: Sequence[Any], overhead: dict[bool, float] | None = None) -> None:
        """Ranks tell one another what each has measured; all of them call this."""
        local, overheads = self._local, overhead or {False: 0.0, True: 0.0}
        for group in groups:
            numbers, ratios = zip(*all_say((local, overheads), group), strict=True)
            local = most(numbers)
            overheads = {share: max(of_rank[share] for of_rank in ratios) for share in overheads}
        for share, stages in local.items():
            rounded = {stage: StageBytes(*map(_rounded, n)) for stage, n in stages.items()}
            self.numbers[share] |= rounded
            self.overheads[share] = overheads[share] or self.overheads[share]
        self._local = {False: {}, True: {}}

    def _of_segments(
        self, report: Any, request: Request, before: Peaks, after: Peaks
    ) -> dict[int, StageBytes]:
        rank, count, plan = request.rank, report.counter, report.plan
        stages = {stage: of_stage.numbers() for stage, of_stage in count.stages.items()}
        whole = sum(s.padded_length for s in plan.segments) / rank.groups.cp.size()
        held = max(0.0, (count.before or before.used) - before.used) / max(whole, 1.0)
        stages = {stage: numbers._replace(before=held) for stage, numbers in stages.items()}
        footprint = with_parts(self.footprint(rank, gathers=count.gathers), request)
        own = tuple(stages.get(n, StageBytes()) for n in range(len(footprint.stages)))
        bound = math.inf
        if {*plan.policies} <= {*ON_DEVICE, *AGAIN}:  # what is copied away stays for a while
            peak = after.allocated - before.used
            bound = least_moment(plan, replace(footprint, stages=own), rank.stage, peak)
        known = {**self.numbers[False], **self.numbers[True]}
        return {
            stage: with_moment(numbers, bound, before, after, known.get(stage), rank)
            for stage, numbers in stages.items()
        }


def with_parts(footprint: Any, request: Request) -> Any:
    """A footprint with what the parts of a call add to it."""
    for part in request.parts:
        footprint = part.footprint(footprint)
    return footprint


def most(ranks: Iterable[Numbers]) -> Numbers:
    """Of every stage the largest numbers of any rank."""
    largest: Numbers = {False: {}, True: {}}
    for of_rank in ranks:
        for share, stages in of_rank.items():
            for stage, numbers in stages.items():
                known = largest[share].get(stage, numbers)
                largest[share][stage] = StageBytes(*map(max, zip(known, numbers, strict=True)))
    return largest


def _rounded(number: float) -> float:
    """To the nearest of so many binary digits."""
    if not 0 < number < math.inf:
        return 0.0
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(mantissa * 2**BITS) / 2**BITS, exponent)
