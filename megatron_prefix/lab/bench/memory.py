"""Device memory of a step by policy, compared with the stock schedule and the memory model.

On a GPU peaks are the allocator's, without weights and their gradients; memory that waits for a
copy on a side stream counts as used. On the CPU they are the bytes that autograd and the sidecar
hold, without temporaries and without what is offloaded, and so is the prediction beside them.

"Phase B" is the time in which waves run, as in "Schedule-Level Shared-Prefix Reuse for LLM RL
Training", section 5, whose memory figures are of that phase.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron_prefix.config import MEMORY_POLICIES, PrefixConfig
from megatron_prefix.errors import StepOutOfMemory, UserError, shown
from megatron_prefix.features.host.part import NAME as HOST_MEMORY
from megatron_prefix.features.host.segment import addresses
from megatron_prefix.lab.bench.counted import SavedBytes
from megatron_prefix.lab.bench.scores import held_by_math, with_saved_scores
from megatron_prefix.lab.bench.timing import GIB
from megatron_prefix.lab.bench.work import GroupShape
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.predict.footprint import Footprint
from megatron_prefix.lab.predict.of_rank import footprint_of_rank
from megatron_prefix.lab.predict.peak_memory import PredictedMemory, predict_memory
from megatron_prefix.lab.rl import loss, passes
from megatron_prefix.lab.rl.step_parts import watching
from megatron_prefix.lab.rl.updates import now
from megatron_prefix.lab.verify import align
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.plan.actions import Action, Plan, policies
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.run.execute.memory_control import free_memory
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.tree import Pairs, TreeOptions, build

STOCK = "stock"


@dataclass(frozen=True)
class Way:
    """One way to run a step.

    Attributes:
        policy: "stock", or a memory policy of the prefix schedule.
        recompute: Megatron's activation recomputation, "none" or "full".
    """

    policy: str
    recompute: str = "none"

    @classmethod
    def parse(cls, text: str) -> Way:
        """Reads POLICY or POLICY+full.

        Raises:
            UserError: anything else.
        """
        policy, plus, recompute = text.partition("+")
        if policy not in (STOCK, *MEMORY_POLICIES) or (plus and recompute != "full"):
            known = ", ".join((STOCK, *MEMORY_POLICIES))
            raise UserError(
                f"{shown(text)}: give one of {known}, and +full to recompute every layer"
            )
        return cls(policy, recompute or "none")

    def __str__(self) -> str:
        return self.policy + ("" if self.recompute == "none" else f"+{self.recompute}")


@dataclass(frozen=True)
class Row:
    """A shape run one way; GiB besides weights and gradients, None if unknown.

    Attributes:
        name: P:R:n.
        way: how it ran.
        base_gib: weights, gradients and everything else in use before.
        predicted_gib, peak_gib: of the step, predicted and measured.
        predicted_wave_gib, wave_gib: while waves run.
        ms: of a forward-backward call.
        offloaded_gib: copied to the host.
        problem: why there is no measurement; "" if there is one.
    """

    name: str
    way: str
    base_gib: float
    predicted_gib: float
    peak_gib: float | None
    predicted_wave_gib: float
    wave_gib: float | None
    ms: float | None
    offloaded_gib: float = 0.0
    problem: str = ""


def measure(
    shape: GroupShape, way: Way, chunks: list[Any], config: PrefixConfig, *, repeats: int, seed: int
) -> Row:
    """Runs a shape one way, `repeats` times after a first call that does not count.

    Args:
        shape: prompt, response, rollouts; every rollout is a wave unless it has a wave length.
        way: schedule and policies.
        chunks: the model, wrapped in DDP.
        config: of the prefix schedule.
        repeats: measured calls; 0: measure the first call.
        seed: of tokens and advantages.
    """
    config = align.turned_on(config, segment_tokens=shape.segment_tokens or 1)
    vocab_size = unwrap(chunks[0]).vocab_size
    with recomputing(chunks, way.recompute):
        memory = predicted(shape, way, chunks, config)
        base = _base(chunks)
        of_step, of_waves = _compared(memory, shape, way, chunks)
        row = Row(shape.name, str(way), base / GIB, of_step, None, of_waves, None, None)
        schedule: Any = (
            PrefixSchedule(replace(config, memory=way.policy))
            if (way.policy != STOCK)
            else stock_schedule()
        )
        items = align.microbatches(shape.groups(1, vocab_size, seed), seed)
        try:
            results = [_call(schedule, chunks, items) for _ in range(1 + repeats)]
        except (torch.OutOfMemoryError, StepOutOfMemory) as error:
            return replace(row, problem=str(error).partition("\n")[0].partition(". ")[0])
        finally:
            free_memory()
        # Workspaces of libraries that the first call has allocated stay.
        base = _base(chunks)
        row = replace(row, base_gib=base / GIB)
        report = schedule.report if isinstance(schedule, PrefixSchedule) else None
        if report is not None and report.retried:
            return replace(row, problem="out of device memory until every segment was recomputed")
        if report is not None:  # of the policies that really ran
            footprint = _footprint(chunks, config)
            memory = predict_memory(report.plan, footprint)[0].within(report.room_bytes)
            of_step, of_waves = _compared(memory, shape, way, chunks)
            row = replace(row, predicted_gib=of_step, predicted_wave_gib=of_waves)
        return _filled(row, schedule, results[1:] or results, base)


def _compared(
    memory: PredictedMemory, shape: GroupShape, way: Way, chunks: list[Any]
) -> tuple[float, float]:
    """What is predicted of what is measured here, of a step and while waves run, GiB."""
    if next(chunks[0].parameters()).device.type != "cuda":
        waves = memory.saved if way.policy == STOCK else memory.wave_peak
        return memory.saved / GIB, waves / GIB
    scores = 0.0
    if way.policy != STOCK:
        longest = max(shape.prompt, shape.segment_tokens or shape.response)
        keys = shape.prompt + shape.response
        scores = held_by_math(unwrap(chunks[0]).config, longest, keys)
    return (memory.peak + scores) / GIB, (memory.wave_peak + scores) / GIB


def _filled(row: Row, schedule: Any, results: Sequence[_Peaks], base: float) -> Row:
    report = schedule.report if isinstance(schedule, PrefixSchedule) else None
    wave = None
    if results[0].by_action and report is not None:
        waits = [segment.waits for segment in report.plan.segments]
        wave = max(
            size
            for result in results
            for index, size in result.by_action.items()
            if not waits[index]
        )
    elif report is None:
        wave = max(result.peak for result in results)
    copied = report.features.get(HOST_MEMORY) if report is not None else None
    return replace(
        row,
        peak_gib=(max(result.peak for result in results) - base) / GIB,
        wave_gib=None if wave is None else (wave - base) / GIB,
        ms=1e3 * min(result.seconds for result in results),
        offloaded_gib=copied.stored / GIB if copied is not None else 0.0,
    )


@dataclass
class _Peaks:
    """Peaks of one call in bytes: of the call, and of every segment's actions."""

    peak: float
    seconds: float
    by_action: dict[int, float]


def _call(schedule: Any, chunks: list[Any], items: Sequence[Any]) -> _Peaks:
    """One forward-backward call."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    device = next(chunks[0].parameters()).device
    step = loss.forward_step(loss.GrpoConfig())
    ours = schedule if isinstance(schedule, PrefixSchedule) else None
    if device.type == "cuda":
        meter = _Meter(device)
        with contextlib.nullcontext() if ours is None else watching(ours, meter.watch):
            seconds = _timed(lambda: passes.run(schedule, step, chunks, items), device)
        return _Peaks(meter.read(), seconds, meter.by_action)
    models = [unwrap(chunk) for chunk in chunks]
    resident = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    with SavedBytes(addresses(*resident)).counting() as counted:
        seconds = _timed(lambda: passes.run(schedule, step, chunks, items), device)
    cache = ours.report.cache_bytes if ours is not None and ours.report is not None else 0
    return _Peaks(counted.peak + cache, seconds, {})


def _timed(work: Any, device: torch.device) -> float:
    begin = now(device)
    work()
    return now(device) - begin


class _Meter:
    """Peaks of the allocator in a call and in its actions; the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak = 0.0
        self.by_action: dict[int, float] = {}
        torch.cuda.reset_peak_memory_stats(device)

    @contextlib.contextmanager
    def watch(self, action: Action) -> Iterator[None]:
        """Surrounds the computation of an action."""
        self.read()
        yield
        before, self._peak = self._peak, 0.0
        index = action.segment
        self.by_action[index] = max(self.by_action.get(index, 0.0), self.read())
        self._peak = max(self._peak, before)

    def read(self) -> float:
        """The highest peak so far; resets the allocator's own."""
        stats = torch.cuda.memory_stats(self._device)
        self._peak = max(self._peak, stats["active_bytes.all.peak"])
        torch.cuda.reset_peak_memory_stats(self._device)
        return self._peak


@contextlib.contextmanager
def recomputing(chunks: list[Any], recompute: str) -> Iterator[None]:
    """Turns Megatron's full recomputation on or off; layers read the config at every call."""
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    values = ("full", "uniform", 1) if recompute == "full" else (None, None, None)
    configs = {id(unwrap(chunk).config): unwrap(chunk).config for chunk in chunks}.values()
    before = [[getattr(config, name) for name in names] for config in configs]
    try:
        for config in configs:
            for name, value in zip(names, values, strict=True):
                setattr(config, name, value)
        yield
    finally:
        for config, old in zip(configs, before, strict=True):
            for name, value in zip(names, old, strict=True):
                setattr(config, name, value)


def predicted(
    shape: GroupShape, way: Way, chunks: list[Any], config: PrefixConfig
) -> PredictedMemory:
    """Predicted memory of a shape (memory "auto": as if all were retained)."""
    footprint = _footprint(chunks, config)
    if way.policy == STOCK:
        length = shape.prompt + shape.response - 1
        footprint = with_saved_scores(footprint, unwrap(chunks[0]).config, length)
    return predict_memory(_plan(shape, way, config), footprint)[0]


def _footprint(chunks: list[Any], config: PrefixConfig) -> Footprint:
    footprint = footprint_of_rank(Rank.of(chunks))
    return replace(footprint, host_layers=config.cache_host_layers)


def _plan(shape: GroupShape, way: Way, config: PrefixConfig) -> Plan:
    """The plan of a flat group; for the stock schedule one rollout after the other."""
    prompt, tokens = np.zeros(shape.prompt, dtype=np.int64), shape.prompt + shape.response
    rollouts = []
    for rollout in range(shape.rollouts):
        inputs = np.concatenate([prompt, np.full(shape.response - 1, rollout + 1)])
        labels = np.append(inputs[1:], 0)
        rollouts.append(Pairs(inputs, labels, np.arange(tokens - 1) >= shape.prompt - 1))
    options = config.tree_options(1)
    if way.policy == STOCK:
        options = TreeOptions(min_gain=shape.rollouts * tokens, segment_tokens=1)
    forest = build(rollouts, [0] * shape.rollouts, options)
    plan = make_plan(forest.all_read() if way.policy == STOCK else forest)
    kept = policies(plan.segments, "retain" if way.policy == STOCK else way.policy)
    return replace(plan, policies=kept)


def _base(chunks: list[Any]) -> float:
    device = next(chunks[0].parameters()).device
    if device.type != "cuda":
        return 0.0
    free_memory()
    return float(torch.cuda.memory_stats(device)["active_bytes.all.current"])
