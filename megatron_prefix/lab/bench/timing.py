"""What `bench` measures, and how the measurements of several ranks become one row."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.across.exchanges import Crossed
from megatron_prefix.lab.bench.work import Setting, Work
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.lab.rl.flops import cost_model, peak_flops
from megatron_prefix.run.report import StepReport
from megatron_prefix.tree import build

GIB = float(1 << 30)


@dataclass(frozen=True)
class Timing:
    """One row of the result. Tokens, segments and microbatches are of all its steps and
    ranks together.

    Attributes:
        name: of the row.
        baseline: "packed" or "rollout", the microbatches of both schedules.
        pack_tokens: most positions of a packed microbatch; 0 if each is one rollout.
        steps: steps that were timed.
        shared_steps: those in which the prefix schedule ran; all of them in mode "on".
        rollouts, microbatches: their number.
        segment_tokens: most positions in a segment.
        segments: of the prefix schedule, in the steps that it ran.
        raw_tokens: positions without sharing.
        executed_tokens: positions that were computed in the steps of the prefix schedule.
        received_tokens: positions whose payloads came from other data-parallel ranks in these.
        received_bytes: of these and of the gradients that came back, on one rank of each
            data-parallel one.
        exchange_wait_ms: what the rank that waits longest waits in a step for such payloads and
            gradients; the mean of its steps.
        stock_step_ms, prefix_step_ms: time of every step's call, that of the slowest rank.
        stock_ms, prefix_ms: their medians.
        stock_gib, prefix_gib: peak of allocated device memory of the rank with most, and what its
            CUDA graphs use; 0 on the CPU.
        predicted_gib: what the memory model says of `prefix_gib`; on the CPU without weights and
            gradients.
        speedup: stock over prefix, of the summed times.
        median_speedup: stock over prefix, of the medians.
        bound: what the FLOP count allows if all that can be shared is shared.
        plan_bound: what it allows with the segments that ran; lower if short spans were
            dissolved.
        of_bound: speedup / bound.
        tflops: 10^12 FLOPs per second and rank that the prefix schedule executed: what forward,
            backward and recomputed segments need in matrix products, over all steps.
        mfu: that over the GPU's dense bf16 rate; None in another dtype, or if the rate is
            not known here.
        phase_ms: of one more call, which is timed action by action: what the slowest rank computes
            in phase A (forwards of inner segments), B (waves) and C (backwards of inner segments),
            and what it waits for others; empty if the stock schedule ran.
        bubble: share of the ranks' time in which they wait in that call; 0 with one stage.
        simulated_bubble: the same as the plan's simulation has it.
        stock_attention, prefix_attention: the attention kernel of each schedule; None where none
            ran.
        graph_tokens: positions of the longest segment whose layers run on CUDA graphs in the end;
            0: none.
        captured_ms: what captures of these took in the timed calls, all together.
        limit_gib: memory limit of the prefix schedule, weights and gradients included; 0: none.
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
    received_tokens: int
    received_bytes: int
    exchange_wait_ms: float
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
    tflops: float
    mfu: float | None
    phase_ms: dict[str, float]
    bubble: float
    simulated_bubble: float
    stock_attention: str | None = None
    prefix_attention: str | None = None
    graph_tokens: int = 0
    captured_ms: float = 0.0
    limit_gib: float = 0.0


class Count(NamedTuple):
    """What one data-parallel rank computed in one step with the prefix schedule.

    `stock_flops` and `plan_flops` are forward FLOPs without sharing and with the segments that ran,
    the output layer on all positions of segments with loss; `flops` what was needed in all.
    """

    shared: bool
    raw: int
    executed: int
    segments: int
    stock_flops: float
    plan_flops: float
    flops: float
    received: int
    received_bytes: int


@dataclass
class Measured:
    """What one schedule's calls took, on this rank or, after `together`, on all.

    Attributes:
        step_ms: time of every step.
        gib: peak of allocated device memory, and what CUDA graphs use.
        predicted_gib: what the memory model said of it, if the prefix schedule ran.
        counts: of every step, if the prefix schedule made it.
        microbatches: of all steps.
        phases: see Timing.phase_ms.
        bubbles: measured and simulated.
        exchange_waits: see Timing.exchange_wait_ms; of every step.
        graph_tokens, captured_ms, limit_gib: see Timing.
    """

    step_ms: list[float] = field(default_factory=list)
    gib: float = 0.0
    predicted_gib: float = 0.0
    counts: list[Count] = field(default_factory=list)
    microbatches: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    bubbles: tuple[float, float] = (0.0, 0.0)
    exchange_waits: list[float] = field(default_factory=list)
    graph_tokens: int = 0
    captured_ms: float = 0.0
    limit_gib: float = 0.0


def flop_bound(spec: ModelSpec, config: PrefixConfig, steps: Sequence[Sequence[Group]]) -> float:
    """FLOPs of the stock schedule over those of one that shares all it may share, and runs nothing
    behind a rollout's last loss where that has no effect (run/read/read_calls.py, `up_to_loss`)."""
    cost, options = (
        cost_model(spec),
        replace(config.tree_options(1), min_gain=0, segment_gain=0),
    )
    pairs = [pairs_of_groups(groups, spec.needs_tails) for groups in steps]
    forests = [build(*some, options).all_read() for some in pairs]
    return sum(map(cost.stock, forests)) / sum(map(cost.prefix, forests))


def counted(spec: ModelSpec, report: StepReport, forward_only: bool) -> Count:
    """What a step's report says of its work."""
    cost, forest, shared = cost_model(spec), report.forest, report.decision.share
    stock = cost.stock(forest)
    needed = cost.prefix(forest) if shared else stock
    crossed = report.crossed or Crossed()
    again = sum(
        cost.segment(segment)
        for index, segment in enumerate(report.plan.segments)
        if report.plan.policy(index) == "recompute"
    )
    return Count(
        shared, forest.raw_tokens, forest.executed_tokens if shared else forest.raw_tokens,
        len(forest.segments) if shared else 0, stock,
        cost.prefix(forest.all_read()) if shared else stock,
        needed if forward_only else 3 * needed + again,
        crossed.received_tokens, crossed.received_bytes,
    )  # fmt: skip


def together(mine: Measured, place: int) -> Measured:
    """The measurements of all ranks; every rank calls this and gets the same.

    Args:
        mine: this rank's; times are those of the slowest rank already.
        place: this rank's number among the data-parallel ranks, which count their own rollouts.
    """
    everyone: list[Any] = [(place, mine)]
    if (size := dist.get_world_size()) > 1:
        everyone = [None] * size
        dist.all_gather_object(everyone, (place, mine))
    parts = [part for _, part in everyone]
    one_each = dict(everyone).values()
    steps = zip(*(part.counts for part in one_each), strict=True)
    slowest = min((part.phases for part in parts), key=lambda phases: phases.get("wait", 0.0))
    return Measured(
        mine.step_ms, max(part.gib for part in parts), max(part.predicted_gib for part in parts),
        [_summed(step) for step in steps], sum(part.microbatches for part in one_each), slowest,
        max(part.bubbles for part in parts),
        max((part.exchange_waits for part in parts), key=sum),
        max(part.graph_tokens for part in parts), max(part.captured_ms for part in parts),
        max(part.limit_gib for part in parts),
    )  # fmt: skip


def _summed(counts: Sequence[Count]) -> Count:
    """Of several ranks or steps."""
    sums = {name: sum(getattr(count, name) for count in counts) for name in Count._fields[1:]}
    return Count(any(count.shared for count in counts), **sums)


def timing(work: Work, setting: Setting, stock: Measured, prefix: Measured) -> Timing:
    """One row from the measurements of all ranks, without the attention kernels."""
    speedup = sum(stock.step_ms) / sum(prefix.step_ms)
    medians = statistics.median(stock.step_ms), statistics.median(prefix.step_ms)
    bound = flop_bound(setting.spec, work.config, work.steps)
    total, baseline = _summed(prefix.counts), setting.baseline
    rate = total.flops / (sum(prefix.step_ms) / 1e3) / setting.layout.world_size
    return Timing(
        name=work.name,
        baseline=baseline.name,
        pack_tokens=baseline.pack_tokens if baseline.packed else 0,
        steps=len(work.steps),
        shared_steps=sum(count.shared for count in prefix.counts),
        rollouts=sum(len(group.rollouts) for groups in work.steps for group in groups),
        microbatches=prefix.microbatches,
        segment_tokens=work.config.segment_tokens,
        segments=total.segments,
        raw_tokens=total.raw,
        executed_tokens=total.executed,
        received_tokens=total.received,
        received_bytes=total.received_bytes,
        exchange_wait_ms=sum(prefix.exchange_waits) / len(work.steps),
        stock_step_ms=tuple(stock.step_ms),
        prefix_step_ms=tuple(prefix.step_ms),
        stock_ms=medians[0],
        prefix_ms=medians[1],
        stock_gib=stock.gib,
        prefix_gib=prefix.gib,
        predicted_gib=prefix.predicted_gib,
        speedup=speedup,
        median_speedup=medians[0] / medians[1],
        bound=bound,
        plan_bound=total.stock_flops / total.plan_flops if total.plan_flops else 1.0,
        of_bound=speedup / bound,
        tflops=rate / 1e12,
        mfu=rate / peak if (peak := peak_flops(setting.dtype)) else None,
        phase_ms=prefix.phases,
        bubble=prefix.bubbles[0], simulated_bubble=prefix.bubbles[1], limit_gib=prefix.limit_gib,
        graph_tokens=prefix.graph_tokens, captured_ms=prefix.captured_ms,
    )  # fmt: skip
