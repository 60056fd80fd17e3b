"""Measures how many bytes of device memory a position takes, by the allocator's own counters.

They are read around every action of ours, or around every model call of Megatron's schedule, and
before and after the step: in the first steps with gradients, and then in one of 50. That waits
for nothing. At the end of such a step ranks tell one another what they have counted, so that all
plan with the same numbers: of each stage those of the rank that has most.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_prefix.features.measure import allocator
from megatron_prefix.features.measure.allocator import Peaks
from megatron_prefix.features.measure.cost_fit import non_negative
from megatron_prefix.plan.actions import ON_DEVICE, Action, Plan
from megatron_prefix.plan.cost import AGAIN
from megatron_prefix.plan.memory import Footprint
from megatron_prefix.plan.sizes import StageBytes, continued
from megatron_prefix.run.agreement import all_say, tried
from megatron_prefix.run.costs import Costs
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.report import StepReport
from megatron_prefix.run.request import Request
from megatron_prefix.sidecar.arena import DeviceBytes

logger = logging.getLogger(__name__)
FIRST_STEPS, ONE_IN = 5, 50
"""Steps with gradients that are measured: so many at first, and then every so many."""
LAYERS_AT_ONCE, LAYERS_MADE_AGAIN = 2, 20
"""While nothing is known of what an action has for its duration: what so many layers keep. A layer
that Megatron recomputes keeps its input, and makes about so many times as much."""
_RIDGE = np.array([1e-12, 1e-12, 1e-5, 1e-4])
"""What came nearly in one proportion with a segment's positions counts as theirs: lengths of waves
differ by a few positions of padding, and spans of equal rollouts follow them otherwise. What
Megatron's schedule takes is predicted from positions where it has not run."""
BITS = 8
"""Of a number: choices do not change with every byte."""


class StageCount(NamedTuple):
    """What was counted of a stage, on one rank or on several; it can be added up.

    Attributes:
        gram, sums: of rows, and of rows and bytes: float64 [4, 4] and [4]. A row has a segment's
            positions if it is inner, if it is a wave, those with loss, and spans with a parent in a
            wave.
        ranks: of each rank the sum of its rows, and of its bytes.
        moment, before: see StageBytes.
    """

    gram: np.ndarray
    sums: np.ndarray
    ranks: tuple[tuple[np.ndarray, float], ...]
    moment: float = 0.0
    before: float = 0.0

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[float]], sizes: Sequence[float]) -> StageCount:
        """Of segments on one rank, and bytes that each has kept."""
        table, kept = np.array(rows, float).reshape(-1, 4), np.array(sizes, float)
        return cls(table.T @ table, table.T @ kept, ((table.sum(0), float(kept.sum())),))

    def plus(self, other: StageCount) -> StageCount:
        """Of these ranks and others."""
        return StageCount(
            self.gram + other.gram, self.sums + other.sums, self.ranks + other.ranks,
            max(self.moment, other.moment), max(self.before, other.before),
        )  # fmt: skip

    def numbers(self, known: StageBytes | None = None) -> StageBytes:
        """What fits all ranks best, as much larger as it must be for the rank that has most; none
        of the numbers is below 0. A kind of segment that did not run keeps what is known of it, or
        else as much as the other. Where no row tells `scored` apart, `inner` and `wave` contain it:
        known numbers that do so are not mixed with others that do not."""
        scale = np.sqrt(np.diag(self.gram))
        used, solved = scale > 0, np.zeros(4)
        if used.any():
            gram = self.gram[np.ix_(used, used)] / np.outer(scale[used], scale[used])
            gram += np.diag(_RIDGE[used])
            solved[used] = non_negative(gram, self.sums[used] / scale[used]) / scale[used]
        ratios = [size / fit for rows, size in self.ranks if (fit := float(rows @ solved)) > 0]
        inner, wave, scored, span = map(float, solved * max(ratios, default=1.0))
        if known is not None and (known.scored < 1) != (scored < 1):  # of a byte
            known = None
        inner = inner if used[0] else known.inner if known else wave
        wave = wave if used[1] else known.wave if known else inner
        return StageBytes(inner, wave, scored, span, self.moment, self.before)


StageCounts = dict[bool, dict[int, StageCount]]
"""By whether a step was shared, and by stage."""


class SegmentBytes:
    """What segments keep on one rank, in one step of the prefix schedule.

    Attributes:
        gathers: whether the rank keeps K/V of all context-parallel ranks.
        before: allocated when the first action began; None: none has.
        stays: whether no tensors of segments come and go between device and host.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank, self._act, self.gathers = rank, rank.act, False
        self.before: float | None = None
        self._rows: dict[int, tuple[list[tuple[float, ...]], list[float]]] = {}
        self._caches: Sequence[DeviceBytes] = ()
        self._forwards: dict[tuple[int, int], float] = {}

    def begin(self, plan: Plan, caches: Sequence[DeviceBytes] = (), *, gathers: bool) -> None:
        """Begins an attempt; `caches`: of the rank's sidecars."""
        self._plan, self.gathers, self.before = plan, gathers, None
        self._caches = caches
        self.stays = {*plan.policies} <= {*ON_DEVICE, *AGAIN}
        self._rows.clear()
        self._forwards.clear()
        self._again: set[Action] = set()

    @contextlib.contextmanager
    def counting(self, action: Action) -> Iterator[None]:
        """Around the computation of an action. Of a wave counts what its forward leaves; of an
        inner segment what the forward that a backward runs again does, or else the least of what
        its forward leaves and its backward frees, if nothing else comes meanwhile: a step's first
        forward may leave more than a segment's tensors (quantised weights), and a backward free
        more (gradients that were on their way to it).
        """
        if self.before is None:
            self.before = allocator.peaks(self._rank.device).used
        allocated, key = self._used, (action.chunk, action.segment)
        segment, policy = self._plan.segments[action.segment], self._plan.policy(action.segment)
        runs_again = policy == "recompute" and action.kind == "B" and action not in self._again
        is_counted = policy in ON_DEVICE and segment.inner == (action.kind == "B")
        is_counted &= self.stays or not segment.inner
        self._again.add(action)
        yield
        size = self._used - allocated
        self._forwards.setdefault(key, size)
        if segment.source < 0 and (runs_again or is_counted):
            frees = segment.inner and not runs_again
            self._add(action, min(-size, self._forwards[key]) if frees else size)

    @property
    def _used(self) -> float:
        """Bytes besides what sidecars have in their arenas."""
        in_arenas = sum(cache.held for cache in self._caches)
        return allocator.peaks(self._rank.device).used - in_arenas

    def _add(self, action: Action, size: float) -> None:
        plan, segment = self._plan, self._plan.segments[action.segment]
        policy = plan.policy(action.segment)
        positions = segment.padded_length / self._rank.groups.cp.size()
        size += self._act * positions * (policy in ON_DEVICE and policy in AGAIN)
        stage = plan.stage(self._rank.stage, action.chunk)
        rows, sizes = self._rows.setdefault(stage, ([], []))
        row = positions * segment.inner, positions * (not segment.inner)
        rows.append((*row, min(positions, segment.num_read), float(continued(segment))))
        sizes.append(size)

    @property
    def stages(self) -> dict[int, StageCount]:
        return {stage: StageCount.of_rows(*counted) for stage, counted in self._rows.items()}


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
            call[:] = [allocator.peaks(device).used] if torch.is_grad_enabled() else []

        def decoded(_: Any, __: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if len(call) == 1 and isinstance(hidden, torch.Tensor) and hidden.dim() > 1:
                call.append(float(hidden.shape[0] * hidden.shape[1] * ranks))

        def ended(*_: Any) -> None:
            if len(call) == 2:  # else it is beside the microbatch's own, without gradients
                self._sizes[chunk].append(allocator.peaks(device).used - call[0])
                self._positions[chunk].append(call[1])
            call.clear()

        decoder = getattr(model, "decoder", None)
        if decoder is None:  # nothing of such a model is shared, and its step is not ours to end
            return
        stack.callback(model.register_forward_pre_hook(begun).remove)
        stack.callback(decoder.register_forward_hook(decoded).remove)
        stack.callback(model.register_forward_hook(ended).remove)

    def stages(
        self, before: Peaks, after: Peaks, known: dict[int, StageBytes]
    ) -> dict[int, StageCount]:
        """What was counted, by stage; `known` before the step. A call's bytes follow its positions,
        and the median leaves out what the first one allocates for all."""
        rank, stages = self._rank, {}
        for chunk, (positions, sizes) in enumerate(zip(self._positions, self._sizes, strict=True)):
            if not positions:
                continue
            a_position = max(0.0, float(np.median(np.array(sizes) / np.array(positions))))
            stage, longest = rank.num_stages * chunk + rank.stage, sorted(positions)[::-1]
            bound = math.inf
            if len(rank.models) == 1:
                held = a_position * sum(longest[: rank.num_stages - rank.stage])
                bound = max(0.0, (_step_peak(before, after) - held) / longest[0])
            count = StageCount.of_rows([(0.0, 1.0, 0.0, 0.0)], [a_position])
            moment = _moment(a_position, bound, before, after, known.get(stage), rank)
            stages[stage] = count._replace(moment=moment)
        return stages


def _step_peak(before: Peaks, after: Peaks) -> float:
    """The most bytes at once in a step that set the maximum, without gradients that it has left."""
    return after.allocated - before.used - max(0.0, after.used - before.used)


def _moment(
    wave: float, bound: float, before: Peaks, after: Peaks, known: StageBytes | None, rank: Rank
) -> float:
    """What actions of a stage have for their duration: so much as the new maximum of the allocator
    says. An old one is only a bound, for what was known, or is guessed by what a wave keeps."""
    layers = LAYERS_AT_ONCE + LAYERS_MADE_AGAIN * bool(rank.config.recompute_granularity)
    guess = layers * wave / rank.layers if known is None else known.moment
    has_moved = after.allocated > before.allocated and bound < math.inf
    return bound if has_moved else min(bound, guess)


class ByteMeter:
    """Counts what positions of one model take in one layout; ranks that meet have the same
    numbers. `costs` gets them."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._local: StageCounts = {False: {}, True: {}}

    def is_due(self, number: int) -> bool:
        """Whether the step of a number, from 1, is measured; the same on all ranks."""
        return self._costs.counts and (number <= FIRST_STEPS or number % ONE_IN == 0)

    @contextlib.contextmanager
    def watching(self, rank: Rank) -> Iterator[None]:
        """Around a step of Megatron's schedule before any is shared: no other rank is told yet."""
        if not self._costs.counts:
            yield
            return
        calls, before = CallBytes(rank), allocator.peaks(rank.device)
        with calls.counting():
            yield
        after = allocator.peaks(rank.device)
        known = self._known(share=False)
        self._local[False] |= calls.stages(before, after, known)

    @contextlib.contextmanager
    def step(
        self, report: StepReport, request: Request, groups: Sequence[Any], number: int
    ) -> Iterator[SegmentBytes | None]:
        """Around the step of a number, whichever schedule runs it; all ranks of the groups enter
        it. Gives what counts the segments' bytes, if any do."""
        rank = request.rank
        if rank.forward_only or not self.is_due(number):
            yield None
            return
        share, calls, before = report.decision.share, CallBytes(rank), allocator.peaks(rank.device)
        count = SegmentBytes(rank) if share else None
        with contextlib.nullcontext() if share else calls.counting():
            yield count
        after, known = allocator.peaks(rank.device), self._known(share=share)
        # What fails on a rank must not keep the others waiting.
        stages, problem = tried(
            lambda: calls.stages(before, after, known) if count is None
            else self._of_segments(count, report, request, before, after, known)
        )  # fmt: skip
        if problem is not None:
            logger.warning("the memory of this step could not be measured: %s", problem)
        self._local[share] |= stages or {}
        overhead = {False: 0.0, True: 0.0}
        if after.allocated > before.allocated and after.reserved > before.reserved:
            overhead[share] = after.reserved / after.allocated
        self.tell(groups, overhead)

    def _known(self, *, share: bool) -> dict[int, StageBytes]:
        """By stage what is known of a schedule, or else of the other."""
        numbers = self._costs.num_bytes
        return {**numbers[not share], **numbers[share]}

    def tell(self, groups: Sequence[Any], overhead: dict[bool, float] | None = None) -> None:
        """Ranks tell one another what each has measured; all of them call this."""
        local, overheads = self._local, overhead or {False: 0.0, True: 0.0}
        for group in groups:
            counts, ratios = zip(*all_say((local, overheads), group), strict=True)
            local = of_all_ranks(counts)
            overheads = {share: max(of_rank[share] for of_rank in ratios) for share in overheads}
        for share, stages in local.items():
            known = self._costs.num_bytes[share]
            for stage, count in stages.items():
                known[stage] = StageBytes(*map(to_bits, count.numbers(known.get(stage))))
            self._costs.overheads[share] = overheads[share] or self._costs.overheads[share]
        self._local = {False: {}, True: {}}

    def _of_segments(
        self, count: SegmentBytes, report: StepReport, request: Request, before: Peaks,
        after: Peaks, known: dict[int, StageBytes],
    ) -> dict[int, StageCount]:  # fmt: skip
        if report.retried or any(part.holds_memory for part in request.parts):
            return {}
        rank, plan, stages = request.rank, report.plan, count.stages
        whole = sum(s.padded_length for s in plan.segments) / rank.groups.cp.size()
        held = max(0.0, (count.before or before.used) - before.used) / max(whole, 1.0)
        own = {
            stage: counted._replace(before=held).numbers(known.get(stage))
            for stage, counted in stages.items()
        }
        footprint = request.footprint(gathers=count.gathers)
        numbers = tuple(own.get(n, StageBytes()) for n in range(len(footprint.stages)))
        bound = math.inf
        if count.stays:  # what was copied away may stay on the device for a while
            peak = _step_peak(before, after)
            bound = least_moment(plan, replace(footprint, stages=numbers), rank.stage, peak)
        return {
            stage: counted._replace(
                before=held,
                moment=_moment(own[stage].wave, bound, before, after, known.get(stage), rank),
            )
            for stage, counted in stages.items()
        }


def of_all_ranks(ranks: Iterable[StageCounts]) -> StageCounts:
    """What several ranks have counted, stage by stage."""
    together: StageCounts = {False: {}, True: {}}
    for of_rank in ranks:
        for share, stages in of_rank.items():
            for stage, count in stages.items():
                known = together[share].get(stage)
                together[share][stage] = count if known is None else known.plus(count)
    return together


def to_bits(number: float) -> float:
    """To the nearest of so many binary digits."""
    if not 0 < number < math.inf:
        return 0.0
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(mantissa * 2**BITS) / 2**BITS, exponent)


def least_moment(plan: Plan, footprint: Footprint, rank: int, peak: float) -> float:
    """The `moment` of a rank's stages, bytes a position, with which its predicted peak is `peak`;
    where that was not reached, at most so much. Infinite without actions."""
    stages = tuple(numbers._replace(moment=0.0) for numbers in footprint.stages)
    memory = replace(footprint, stages=stages).of(plan)
    used, positions = memory.loads(plan.policies).used[rank], memory.positions[rank]
    computed = positions > 0
    bounds = (peak - used[computed]) / positions[computed]
    return max(0.0, float(bounds.min(initial=math.inf)))
