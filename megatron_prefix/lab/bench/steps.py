"""Both schedules timed side by side, in one job, on the same microbatches.

A shape is P prompt tokens, R response tokens and n rollouts, flat, and its one step is timed again
and again; of a rollout file consecutive steps are timed, each of other groups.  Times are of a
whole call as a trainer makes it, planning and gradient accumulation into DDP's buffers included,
the optimizer step not; of several ranks the slowest counts.  The FLOP bound is the ratio of matrix
FLOPs, attention pairs included, without sharing and with all that can be shared (plan/cost.py), the
output layer on all positions of a segment with loss: what sharing alone allows.  Packing changes
neither.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.graphs.layers import LayerGraphs
from megatron_prefix.features.graphs.part import graphs_of
from megatron_prefix.features.measure.cost_meter import TUNED
from megatron_prefix.features.measure.stopwatch import TimedActions
from megatron_prefix.lab.bench.timing import GIB, Measured, Timing, counted, timing, together
from megatron_prefix.lab.bench.work import GroupShape, Setting, Work
from megatron_prefix.lab.models.config import alignment
from megatron_prefix.lab.rl import loss, packing, passes, report_numbers
from megatron_prefix.lab.rl.job import ModelOptions
from megatron_prefix.lab.rl.like_for_like import attention_of
from megatron_prefix.lab.rl.step_parts import with_part
from megatron_prefix.lab.runtime.groups import forget_logged_losses
from megatron_prefix.lab.verify import align
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.execute.memory_control import free_memory
from megatron_prefix.run.schedule import PrefixSchedule


def time_work(
    work: Work, setting: Setting, chunks: list[Any], stock_times: dict[str, Measured]
) -> Timing:
    """Times both schedules on the same microbatches, after the same warm-up; all ranks call this.

    Args:
        work: what is timed.
        setting: the model and its layout.
        chunks: the rank's model chunks, wrapped in DDP.
        stock_times: remembers the stock schedule by name, so that two wave lengths of one shape
            time it once.

    Raises:
        UserError: the model cannot run the microbatches.
    """
    packing.check(chunks, setting.baseline)
    all_steps = [
        microbatches(work, setting, groups, setting.seed + number)
        for number, groups in enumerate([*work.warm_up, *work.steps])
    ]
    first, steps = all_steps[: len(work.warm_up)], all_steps[len(work.warm_up) :]
    if work.name not in stock_times:
        run = _Run(stock_schedule(), chunks, setting, work.config.watchdog_minutes)
        stock_times[work.name] = run.timed(first, steps, work.repeats)
    trained = loss.trained if setting.forward_only else None
    callbacks = Callbacks(trained, passes_together=True)
    # As in a trainer's process: in mode "auto" Megatron's schedule runs first, and is measured.
    schedule = PrefixSchedule(work.config, callbacks, looks_first=True)
    run = _Run(schedule, chunks, setting, work.config.watchdog_minutes)
    measured = run.timed(first, steps, work.repeats)
    row, attention = timing(work, setting, stock_times[work.name], measured), attention_of(chunks)
    return replace(row, stock_attention=attention.stock, prefix_attention=attention.prefix)


def microbatches(work: Work, setting: Setting, groups: Sequence[Any], seed: int) -> list[Any]:
    """This rank's microbatches of a step."""
    layout, baseline = setting.layout, setting.baseline
    mine, least = align.of_this_rank(setting.spec, layout, groups, work.config, baseline, seed)
    return align.made(mine, baseline, alignment(setting.spec, layout), least, seed)


class _Run:
    """Calls of one schedule."""

    def __init__(
        self, schedule: align.Schedule, chunks: list[Any], setting: Setting, minutes: float
    ) -> None:
        self._schedule, self._chunks, self._setting = schedule, chunks, setting
        self._minutes = minutes
        parameter = next(chunks[0].parameters())
        self._device, self._on_gpu = parameter.device, parameter.is_cuda

    @property
    def _warm_up_calls(self) -> int:
        """More of ours in mode "auto", which runs the first call with Megatron's schedule, and
        where CUDA graphs may be tried: by then it is settled whether they stay."""
        schedule, least = self._schedule, self._setting.warm_up_calls
        if not isinstance(schedule, PrefixSchedule):
            return least
        least += schedule.config.mode == "auto"
        tries_graphs = self._on_gpu and schedule.config.graph_tokens == "auto"
        return max(least, TUNED) if tries_graphs else least

    def timed(
        self, warm_up: Sequence[Sequence[Any]], steps: Sequence[Sequence[Any]], repeats: int
    ) -> Measured:
        """Runs the warm-up's steps, in turn, then times the others. As in a trainer's process, the
        largest peak so far is this schedule's own: what ours measures of memory counts on that."""
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for number in range(max(self._warm_up_calls, len(warm_up))):
            self._call(warm_up[number % len(warm_up)])
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        measured = Measured(microbatches=sum(map(len, steps)))
        for items in steps:
            times = []
            for _ in range(repeats):
                times.append(self._call(items))
                measured.captured_ms += 1e3 * sum(graphs.captured for graphs in self._graphs())
            measured.step_ms.append(statistics.median(times))
            if isinstance(self._schedule, PrefixSchedule):
                report = self._schedule.report
                if report is None:
                    raise RuntimeError("the prefix schedule left no report")
                spec, forward_only = self._setting.spec, self._setting.forward_only
                measured.counts.append(counted(spec, report, forward_only))
                waited = report.crossed.waited() if report.crossed else 0.0
                measured.exchange_waits.append(1e3 * waited)
                predicted = (report_numbers.predicted_peak(report) or 0.0) / GIB
                measured.predicted_gib = max(measured.predicted_gib, predicted)
                limit = (report.base_bytes + self._schedule.memory.limit) / GIB
                measured.limit_gib = max(measured.limit_gib, limit if limit < math.inf else 0.0)
        if self._on_gpu:
            graphs = self._graphs()
            measured.gib = peak_bytes(graphs) / GIB
            measured.graph_tokens = max((of_chunk.most for of_chunk in graphs), default=0)
        self._watch(measured, steps[-1])
        return together(measured, align.data_rank())

    def _graphs(self) -> list[LayerGraphs]:
        """Of our schedule's."""
        return all_graphs(self._chunks) if isinstance(self._schedule, PrefixSchedule) else []

    def _watch(self, measured: Measured, items: Sequence[Any]) -> None:
        """One more call, timed action by action."""
        schedule = self._schedule
        if not isinstance(schedule, PrefixSchedule):
            return
        with with_part(schedule, TimedActions):
            self._call(items)
        report = schedule.report
        stopwatch = report_numbers.stopwatch_of(report)
        if report is None or stopwatch is None or not report.decision.share:
            return
        line = report_numbers.timeline(stopwatch, report.plan)
        measured.phases = {
            name: 1e3 * spent
            for name, spent in report_numbers.phases(report, line.makespan / 1e3).items()
        }
        measured.bubbles = line.bubble_fraction, report_numbers.bubble_fraction(report)

    def _call(self, items: Sequence[Any]) -> float:
        """Milliseconds of one call, those of the slowest rank."""
        with passes.watching(self._schedule, self._minutes):
            return self._timed(items)

    def _timed(self, items: Sequence[Any]) -> float:
        wait: Callable[[], None] = torch.cuda.synchronize if self._on_gpu else (lambda: None)
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        several = dist.get_world_size() > 1
        wait()
        if several:
            dist.barrier()
        begin = time.perf_counter()
        if self._setting.forward_only:
            with torch.no_grad():
                step = loss.logprob_step()
                passes.run(self._schedule, step, self._chunks, items, forward_only=True)
        else:
            passes.run(self._schedule, loss.forward_step(loss.GrpoConfig()), self._chunks, items)
        wait()
        spent = torch.tensor(1e3 * (time.perf_counter() - begin), device=self._device)
        if several:
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        return float(spent)


def all_graphs(chunks: Sequence[Any]) -> list[LayerGraphs]:
    """CUDA graphs of model chunks, those that have some."""
    return [*filter(None, map(graphs_of, chunks))]


def peak_bytes(graphs: Sequence[LayerGraphs]) -> int:
    """The most device memory at once since torch's statistics were reset, with what only CUDA
    graphs use. While graphs are captured torch counts that itself, so the sum may have it twice;
    there never was more than torch has reserved."""
    peak = torch.cuda.max_memory_allocated() + sum(of.uncounted_bytes for of in graphs)
    return min(peak, torch.cuda.max_memory_reserved())


def aligned(
    options: ModelOptions,
    setting: Setting,
    configs: Sequence[PrefixConfig],
    num_layers: int,
    advance: Callable[..., None] = lambda *_: None,
) -> list[align.Alignment]:
    """Aligns the two schedules on small groups with a model of the same kind and few layers, at
    least one per stage and one of every kind, with each of several configurations; all ranks call
    this. `advance`: as of `align.align`."""
    layout, spec, baseline = setting.layout, setting.spec, setting.baseline
    stages = layout.pp * layout.vpp
    least = -(-max(num_layers, spec.num_different, 1) // stages) * stages
    small = spec.first(least)
    chunks = options.build(small, layout)
    exact = None
    if options.dtype == "bfloat16":
        exact = functools.cache(options.reference(small, layout, chunks))
    groups = GroupShape(512, 128, 4).groups(layout.dp, spec.vocab_size or 0, options.seed)
    try:
        verdicts = []
        for config in configs:
            mine, packs = align.of_this_rank(small, layout, groups, config, baseline, options.seed)
            verdict = align.align(
                chunks, mine, config, seed=options.seed, multiple=alignment(small, layout),
                reference=exact, baseline=baseline, least=packs,
                num_tokens=sum(len(r) - 1 for group in groups for r in group.rollouts),
                advance=advance,
            )  # fmt: skip
            verdicts.append(align.over_ranks(verdict))
        return verdicts
    finally:
        del chunks, exact
        if options.device == "cuda":
            # Versions of a function that torch.compile has made for these models count against its
            # limit, beyond which it compiles no more.
            torch.compiler.reset()
        forget_logged_losses()  # Megatron's log is as long as this model has layers
        free_memory()
