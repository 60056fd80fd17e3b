"""Both schedules timed side by side, in one process, on the same microbatches.

A shape is P prompt tokens, R response tokens and n rollouts, flat, and its one step is timed again
and again; of a rollout file consecutive steps are timed, each of other groups.  Times are of a
whole forward-backward call as a trainer makes it, planning and gradient accumulation into DDP's
buffers included, the optimizer step not.  The FLOP bound is the ratio of matrix FLOPs, attention
pairs included, without sharing and with all that can be shared (plan/cost.py), the output layer on
all positions of a segment with loss: what sharing alone allows.  Packing changes neither.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_prefix.config import PrefixConfig
from megatron_prefix.data.generate import generate
from megatron_prefix.data.pairs import pairs_of_groups
from megatron_prefix.data.rollouts import Group
from megatron_prefix.errors import UserError, shown
from megatron_prefix.models.presets import ModelSpec
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.rl import loss, packing, passes
from megatron_prefix.rl.baseline import Baseline
from megatron_prefix.rl.job import ModelOptions
from megatron_prefix.run.oom_retry import free_memory
from megatron_prefix.run.schedule import PrefixSchedule, StepReport
from megatron_prefix.runtime.layout import Layout
from megatron_prefix.tree import build
from megatron_prefix.verify import align

GIB = float(1 << 30)
WARM_UP = 3
"""Calls of each schedule before the timed ones: the prefix schedule's kernels choose by the shapes
that they have met, and make plans for some in the first call and for others in the third."""


@dataclass(frozen=True)
class GroupShape:
    """What one row of the sweep runs.

    Attributes:
        prompt: tokens of the shared prompt.
        response: tokens of each response.
        rollouts: rollouts of the group.
        segment_tokens: see PrefixConfig; None keeps the configured one.
    """

    prompt: int
    response: int
    rollouts: int
    segment_tokens: int | None = None

    @classmethod
    def parse(cls, text: str) -> GroupShape:
        """Reads P:R:n or P:R:n:WAVE_TOKENS.

        Raises:
            UserError: anything else.
        """
        try:
            numbers = [int(part) for part in text.split(":")]
        except ValueError:
            numbers = []
        if len(numbers) not in (3, 4) or min(numbers, default=0) < 1:
            raise UserError(
                f"shape {shown(text)}: give P:R:n, e.g. 10240:2048:8, or P:R:n:WAVE_TOKENS"
            )
        return cls(*numbers)

    @property
    def name(self) -> str:
        """What reports call it."""
        return f"{self.prompt}:{self.response}:{self.rollouts}"

    def group(self, vocab_size: int, seed: int) -> Group:
        """The shape's rollouts, of random tokens."""
        made = generate(
            1, self.prompt, self.response, self.rollouts, vocab_size=vocab_size, seed=seed
        )
        return next(made)


@dataclass(frozen=True)
class Work:
    """What one row of the result times.

    Attributes:
        name: P:R:n of a synthetic shape, or the rollout file.
        config: of the prefix schedule.
        warm_up: groups of the steps that are run before the timed ones, at least one.
        steps: groups of every timed step.
        repeats: how often each step is timed; its time is the median.
    """

    name: str
    config: PrefixConfig
    warm_up: Sequence[Sequence[Group]]
    steps: Sequence[Sequence[Group]]
    repeats: int = 1


@dataclass(frozen=True)
class Timing:
    """One row of the result. Tokens, segments and microbatches are of all its steps together.

    Attributes:
        name: of the row.
        baseline: "packed" or "rollout", the microbatches of both schedules.
        pack_tokens: most positions of a packed microbatch; 0 where each is one rollout.
        steps: steps that were timed.
        shared_steps: those in which the prefix schedule ran; all of them in mode "on".
        rollouts, microbatches: their number.
        segment_tokens: most positions in a segment.
        segments: of the prefix schedule, in the steps that it ran.
        raw_tokens: positions without sharing.
        executed_tokens: positions that were computed in the steps of the prefix schedule.
        stock_step_ms, prefix_step_ms: time of every step's forward-backward call.
        stock_ms, prefix_ms: their medians.
        stock_gib, prefix_gib: peak of allocated device memory; 0 on the CPU.
        predicted_gib: what the memory model says of `prefix_gib`; on the CPU without weights and
            gradients.
        speedup: stock over prefix, of the summed times.
        median_speedup: stock over prefix, of the medians.
        bound: what the FLOP count allows where all that can be shared is.
        plan_bound: what it allows with the segments that ran; lower where short spans were
            dissolved.
        of_bound: speedup / bound.
    """

    name: str
    baseline: str
    pack_tokens: int
    steps: int
    shared_steps: int
    rollouts: int
    microbatches: int
    segment_tokens: int | str
    segments: int
    raw_tokens: int
    executed_tokens: int
    stock_step_ms: tuple[float, ...]
    prefix_step_ms: tuple[float, ...]
    stock_ms: float
    prefix_ms: float
    stock_gib: float
    prefix_gib: float
    predicted_gib: float
    speedup: float
    median_speedup: float
    bound: float
    plan_bound: float
    of_bound: float

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


@dataclass
class Measured:
    """What one schedule's calls took.

    Attributes:
        step_ms: time of every step.
        gib: peak of allocated device memory.
        reports: of every step, where the prefix schedule made it.
    """

    step_ms: list[float] = field(default_factory=list)
    gib: float = 0.0
    reports: list[StepReport] = field(default_factory=list)


def cost_model(spec: ModelSpec) -> CostModel:
    """FLOPs of a dense model, without any overhead: what the bound is made of."""
    if spec.vocab_size is None:
        raise UserError(f"model {spec.name} has no vocabulary yet; call with_vocab(size)")
    return replace(CostModel.of_spec(spec), action_tokens=0.0)


def flop_bound(spec: ModelSpec, config: PrefixConfig, steps: Sequence[Sequence[Group]]) -> float:
    """FLOPs of the stock schedule over those of one that shares all it may share."""
    cost, options = (
        cost_model(spec),
        replace(config.tree_options(1), min_gain=0, segment_gain=0, share="batch"),
    )
    forests = [build(*pairs_of_groups(groups), options).all_read() for groups in steps]
    return sum(map(cost.stock, forests)) / sum(map(cost.prefix, forests))


def time_work(
    work: Work,
    spec: ModelSpec,
    chunks: list[Any],
    baseline: Baseline,
    *,
    seed: int,
    stock_times: dict[str, Measured],
) -> Timing:
    """Times both schedules on the same microbatches, after the same warm-up.

    Args:
        work: what is timed.
        spec: the model's shape.
        chunks: the model, wrapped in DDP.
        baseline: the microbatches.
        seed: of the advantages.
        stock_times: remembers the stock schedule by name, so that two wave lengths of one shape
            time it once.

    Raises:
        UserError: the model cannot run the microbatches.
    """
    packing.check(chunks, baseline)
    all_steps = [
        packing.microbatches(align.microbatches(groups, seed + number), baseline)
        for number, groups in enumerate([*work.warm_up, *work.steps])
    ]
    first, steps = all_steps[: len(work.warm_up)], all_steps[len(work.warm_up) :]
    if work.name not in stock_times:
        stock_times[work.name] = _timed(
            get_forward_backward_func(), chunks, first, steps, work.repeats
        )
    stock = stock_times[work.name]
    prefix = _timed(PrefixSchedule(work.config), chunks, first, steps, work.repeats)
    bounds = flop_bound(spec, work.config, work.steps), _plan_bound(spec, prefix.reports)
    return _timing(work, baseline, sum(map(len, steps)), stock, prefix, bounds)


def _plan_bound(spec: ModelSpec, reports: Sequence[StepReport]) -> float:
    cost = cost_model(spec)
    stock = [cost.stock(report.forest) for report in reports]
    prefix = [
        cost.prefix(report.forest.all_read()) if report.decision.share else whole
        for report, whole in zip(reports, stock, strict=True)
    ]
    return sum(stock) / sum(prefix)


def _timing(
    work: Work,
    baseline: Baseline,
    microbatches: int,
    stock: Measured,
    prefix: Measured,
    bounds: tuple[float, float],
) -> Timing:
    shared = [report for report in prefix.reports if report.decision.share]
    kept = [report for report in prefix.reports if not report.decision.share]
    speedup = sum(stock.step_ms) / sum(prefix.step_ms)
    medians = statistics.median(stock.step_ms), statistics.median(prefix.step_ms)
    return Timing(
        name=work.name,
        baseline=baseline.name,
        pack_tokens=baseline.pack_tokens if baseline.packed else 0,
        steps=len(work.steps),
        shared_steps=len(shared),
        rollouts=sum(len(group.rollouts) for groups in work.steps for group in groups),
        microbatches=microbatches,
        segment_tokens=work.config.segment_tokens,
        segments=sum(len(report.forest.segments) for report in shared),
        raw_tokens=sum(report.forest.raw_tokens for report in prefix.reports),
        executed_tokens=sum(report.forest.executed_tokens for report in shared)
        + sum(report.forest.raw_tokens for report in kept),
        stock_step_ms=tuple(stock.step_ms),
        prefix_step_ms=tuple(prefix.step_ms),
        stock_ms=medians[0],
        prefix_ms=medians[1],
        stock_gib=stock.gib,
        prefix_gib=prefix.gib,
        predicted_gib=max(report.predicted_peak or 0.0 for report in prefix.reports) / GIB,
        speedup=speedup,
        median_speedup=medians[0] / medians[1],
        bound=bounds[0],
        plan_bound=bounds[1],
        of_bound=speedup / bounds[0],
    )


def _timed(
    schedule: align.Schedule,
    chunks: list[Any],
    warm_up: Sequence[Sequence[Any]],
    steps: Sequence[Sequence[Any]],
    repeats: int,
) -> Measured:
    """Runs the warm-up's steps, at least WARM_UP calls, then times the others."""
    for number in range(max(WARM_UP, len(warm_up))):
        _call(schedule, chunks, warm_up[number % len(warm_up)])
    if _on_gpu(chunks):
        torch.cuda.reset_peak_memory_stats()
    found = Measured()
    for items in steps:
        times = [_call(schedule, chunks, items) for _ in range(repeats)]
        found.step_ms.append(statistics.median(times))
        if isinstance(schedule, PrefixSchedule):
            if schedule.report is None:
                raise RuntimeError("the prefix schedule left no report")
            found.reports.append(schedule.report)
    found.gib = torch.cuda.max_memory_allocated() / GIB if _on_gpu(chunks) else 0.0
    return found


def _call(schedule: align.Schedule, chunks: list[Any], items: Sequence[Any]) -> float:
    """Milliseconds of one forward-backward call."""
    wait: Callable[[], None] = torch.cuda.synchronize if _on_gpu(chunks) else (lambda: None)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    wait()
    begin = time.perf_counter()
    passes.run(schedule, loss.forward_step(loss.GrpoConfig()), chunks, items)
    wait()
    return 1e3 * (time.perf_counter() - begin)


def _on_gpu(chunks: list[Any]) -> bool:
    return bool(next(chunks[0].parameters()).is_cuda)


def aligned(
    options: ModelOptions,
    spec: ModelSpec,
    layout: Layout,
    configs: Sequence[PrefixConfig],
    num_layers: int,
    baseline: Baseline = align.ROLLOUT,
) -> list[align.Alignment]:
    """Aligns the two schedules on a small group with a model of the same kind and few layers, with
    each of several configurations."""
    small = replace(spec, num_layers=min(num_layers, spec.num_layers))
    chunks = options.build(small, layout)
    exact = None
    if options.dtype == "bfloat16":
        exact = functools.cache(options.reference(small, layout, chunks))
    group = GroupShape(512, 128, 4).group(spec.vocab_size or 0, options.seed)
    try:
        return [
            align.over_ranks(
                align.align(
                    chunks, [group], config, seed=options.seed, reference=exact, baseline=baseline
                )
            )
            for config in configs
        ]
    finally:
        del chunks, exact
        free_memory()
