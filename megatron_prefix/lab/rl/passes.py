"""Runs a schedule, computes log-probs, and sums logs over microbatches and ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.watchdog.watchdog import Watchdog
from megatron_prefix.lab.rl import routes
from megatron_prefix.lab.rl.batches import trained_logprobs
from megatron_prefix.lab.rl.loss import ForwardStep, logprob_step
from megatron_prefix.run.schedule import PrefixSchedule

Microbatch = dict[str, Any]
Schedule = Callable[..., list[Any]]


def watching(
    schedule: Schedule, minutes: float = PrefixConfig.watchdog_minutes
) -> contextlib.AbstractContextManager[None]:
    """Says where a step stands that takes far too long, Megatron's own too; around more than the
    schedule's call it covers what waits for the device.

    Args:
        schedule: of the step.
        minutes: see PrefixConfig; a prefix schedule has its own.
    """
    if isinstance(schedule, PrefixSchedule):
        minutes = schedule.config.watchdog_minutes
        if schedule.config.mode != "off":
            return schedule.around()
    return _stock_watchdog(minutes).step(lambda: 0.0)


@functools.cache
def _stock_watchdog(minutes: float) -> Watchdog:
    return Watchdog(60 * minutes)


def run(
    schedule: Schedule,
    step: ForwardStep,
    chunks: list[Any],
    items: Sequence[Microbatch],
    *,
    forward_only: bool = False,
) -> list[dict[str, Tensor]]:
    """Calls a schedule as Megatron's training loop does.

    Returns:
        The logs of every microbatch, in order; an empty list on ranks without the last stage.
    """
    several = len(chunks) > 1
    with watching(schedule), routes.followed(chunks, items):
        return schedule(
            forward_step_func=step,
            data_iterator=[iter(items) for _ in chunks] if several else iter(items),
            model=chunks if several else chunks[0],
            num_microbatches=len(items),
            seq_length=max(item["tokens"].shape[1] for item in items),
            micro_batch_size=1,
            forward_only=forward_only,
        )


def logprobs(
    schedule: Schedule, chunks: list[Any], items: Sequence[Microbatch]
) -> list[NDArray[np.float64]] | None:
    """Log-probs of the trained tokens, without gradients.

    Returns:
        Per microbatch float64 [trained tokens]; None on ranks without the last stage.
    """
    with torch.no_grad():
        logs = run(schedule, logprob_step(), chunks, items, forward_only=True)
    if not logs:
        return None
    return [trained_logprobs(item, log["logprobs"]) for item, log in zip(items, logs, strict=True)]


def log_sums(logs: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Sums over microbatches of logs that are [2] tensors (sum over tokens, number of tokens)."""
    return {name: torch.stack([log[name] for log in logs]).sum(0) for name in (logs or [{}])[0]}


def mean_over_ranks(
    sums: Mapping[str, Tensor], names: Iterable[str], device: torch.device
) -> dict[str, float]:
    """Means per trained token over all ranks of the job; every rank gets them.

    Tensor-parallel ranks have the same microbatches and count several times, both in the sum and in
    the number of tokens; ranks without the last stage have no `sums` and add zeros.

    Args:
        names: of the logs, the same on every rank.
    """
    none = torch.zeros(2)
    table = torch.stack([sums.get(name, none).to(device, torch.float64) for name in names])
    dist.all_reduce(table)
    return {n: s / max(c, 1.0) for n, (s, c) in zip(names, table.tolist(), strict=True)}


def sum_over_ranks(
    values: Mapping[str, float], device: torch.device, copies: int
) -> dict[str, float]:
    """Sums over all ranks of the job; `copies` ranks have counted the same."""
    table = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    dist.all_reduce(table)
    return {n: v / copies for n, v in zip(values, table.tolist(), strict=True)}
