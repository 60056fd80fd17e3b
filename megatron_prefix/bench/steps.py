"""Both schedules timed side by side, in one process, on the same synthetic groups.

A shape is P prompt tokens, R response tokens and n rollouts, flat.  Times are of a whole forward-
backward call as a trainer makes it, gradient accumulation into DDP's buffers included, the
optimizer step not.  The FLOP bound is the ratio of matrix FLOPs with and without sharing
(plan/cost.py): no schedule that computes the same thing with the same kernels can be faster.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_prefix.config import PrefixConfig
from megatron_prefix.data.generate import generate
from megatron_prefix.data.rollouts import Group
from megatron_prefix.errors import UserError, shown
from megatron_prefix.models.presets import ModelSpec
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.rl import loss, passes
from megatron_prefix.rl.job import ModelOptions
from megatron_prefix.run.oom_retry import free_memory
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.runtime.layout import Layout
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
class Timing:
    """One row of the result.

    Attributes:
        name: P:R:n of a synthetic shape, or the rollout file.
        rollouts: their number.
        segment_tokens: most positions in a wave.
        raw_tokens, executed_tokens: positions without and with sharing.
        stock_ms, prefix_ms: median time of a forward-backward call.
        stock_gib, prefix_gib: peak of allocated device memory; 0 on the CPU.
        predicted_gib: what the memory model says of `prefix_gib`; on the CPU without weights and
            gradients.
        speedup: stock over prefix.
        bound: what the FLOP count allows.
        of_bound: speedup / bound.
    """

    name: str
    rollouts: int
    segment_tokens: int
    raw_tokens: int
    executed_tokens: int
    stock_ms: float
    prefix_ms: float
    stock_gib: float
    prefix_gib: float
    predicted_gib: float
    speedup: float
    bound: float
    of_bound: float

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def cost_model(spec: ModelSpec) -> CostModel:
    """FLOPs of a dense model, without any overhead: what the bound is made of."""
    if spec.vocab_size is None:
        raise UserError(f"model {spec.name} has no vocabulary yet; call with_vocab(size)")
    return replace(CostModel.of_spec(spec), action_tokens=0.0)


def time_groups(
    name: str,
    groups: Sequence[Group],
    spec: ModelSpec,
    chunks: list[Any],
    config: PrefixConfig,
    *,
    repeats: int,
    seed: int,
    stock_times: dict[str, tuple[float, float]],
) -> Timing:
    """Times both schedules on the rollouts of one step.

    Args:
        name: of the row.
        groups: the rollouts.
        spec: the model's shape.
        chunks: the model, wrapped in DDP.
        config: of the prefix schedule.
        repeats: timed calls of each schedule, after WARM_UP that are not timed.
        seed: of the advantages.
        stock_times: remembers the stock schedule's (ms, GiB) by name, so that two wave lengths of
            one shape time it once.
    """
    ours = PrefixSchedule(replace(config, mode="on"))
    items = align.microbatches(groups, seed)
    if name not in stock_times:
        stock_times[name] = _timed(get_forward_backward_func(), chunks, items, repeats)
    stock_ms, stock_gib = stock_times[name]
    prefix_ms, prefix_gib = _timed(ours, chunks, items, repeats)
    if ours.report is None:
        raise RuntimeError("the prefix schedule left no report")
    forest = ours.report.forest
    bound = cost_model(spec).speedup(forest)
    speedup = stock_ms / prefix_ms
    predicted = (ours.report.predicted_peak or 0.0) / GIB
    return Timing(
        name, len(items), config.segment_tokens, forest.raw_tokens, forest.executed_tokens,
        stock_ms, prefix_ms, stock_gib, prefix_gib, predicted, speedup, bound, speedup / bound,
    )  # fmt: skip


def _timed(
    schedule: align.Schedule, chunks: list[Any], items: Sequence[Any], repeats: int
) -> tuple[float, float]:
    """Median milliseconds and peak GiB of a call."""
    step = loss.forward_step(loss.GrpoConfig())
    cuda = torch.cuda.is_available() and next(chunks[0].parameters()).is_cuda
    wait: Callable[[], None] = torch.cuda.synchronize if cuda else (lambda: None)
    times = []
    for repeat in range(-WARM_UP, repeats):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        if cuda and repeat == 0:
            torch.cuda.reset_peak_memory_stats()
        wait()
        begin = time.perf_counter()
        passes.run(schedule, step, chunks, items)
        wait()
        times.append(1e3 * (time.perf_counter() - begin))
    peak = torch.cuda.max_memory_allocated() / GIB if cuda else 0.0
    return statistics.median(times[WARM_UP:]), peak


def aligned(
    options: ModelOptions,
    spec: ModelSpec,
    layout: Layout,
    configs: Sequence[PrefixConfig],
    num_layers: int,
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
                align.align(chunks, [group], config, seed=options.seed, reference=exact)
            )
            for config in configs
        ]
    finally:
        del chunks, exact
        free_memory()
