"""A training run on one rank: steps, metrics, checkpoints, and a summary at the end."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_prefix.errors import UserError
from megatron_prefix.lab.numerics import compare
from megatron_prefix.lab.rl import checkpoint, run_folder
from megatron_prefix.lab.rl.checkpoint import Identity
from megatron_prefix.lab.rl.like_for_like import attention_of
from megatron_prefix.lab.rl.metrics import Metrics, MetricsWriter
from megatron_prefix.lab.rl.settings import RunOptions
from megatron_prefix.lab.rl.trainer import CompletedStep, Trainer
from megatron_prefix.lab.rl.updates import TrainingError

logger = logging.getLogger(__name__)
COMPARED = (
    "loss_max_abs_diff", "loss_limit", "grad_max_rel_diff", "tolerance", "param_max_abs_diff",
    "param_limit", "passed",
)  # fmt: skip
"""What a summary takes from the verdict on a run's updates."""


@dataclass
class Summary:
    """The result of a run; the keys of `train --json`. Times are medians over steps, in seconds.

    Attributes:
        first_step, last_step: steps of this run, from 1.
        raw_tokens, executed_tokens: positions of all updates, without and with sharing.
        step_s: one step's updates: forward, backward, optimizer.
        stock_step_s: the stock schedule's; None without a comparison, as are the next eight.
        speedup: stock_step_s / step_s.
        loss_max_abs_diff, grad_max_rel_diff, param_max_abs_diff: largest over steps.
        loss_limit, tolerance, param_limit: the limit of each of these (`tolerance`: of gradients).
        passed: every update was within the numerics policy; None in 16 bit, as only an fp32
            reference can tell; then the limits are None, too.
        failures: what was outside the policy.
        loss, reward_mean, grad_norm: of the last step.
        skipped_updates: updates skipped since the very first step.
        stock_attention, prefix_attention: the attention kernel of each schedule on the first rank;
            None where it did not run.
        error: why the run ended early, or None.
        output, metrics, checkpoint: paths.
    """

    first_step: int
    last_step: int
    output: str
    metrics: str
    raw_tokens: int = 0
    executed_tokens: int = 0
    step_s: float | None = None
    stock_step_s: float | None = None
    speedup: float | None = None
    loss_max_abs_diff: float | None = None
    grad_max_rel_diff: float | None = None
    param_max_abs_diff: float | None = None
    loss_limit: float | None = None
    tolerance: float | None = None
    param_limit: float | None = None
    passed: bool | None = None
    failures: list[str] = field(default_factory=list)
    loss: float | None = None
    reward_mean: float | None = None
    grad_norm: float | None = None
    skipped_updates: int = 0
    stock_attention: str | None = None
    prefix_attention: str | None = None
    error: str | None = None
    checkpoint: str | None = None


def run(
    trainer: Trainer, options: RunOptions, identity: Identity, show: Callable[[CompletedStep], None]
) -> Summary:
    """Train up to `options.steps`; every rank of the job calls this.

    Args:
        identity: of the run, for its checkpoints.
        show: called after every step.

    Raises:
        UserError: nothing to resume from, something else to resume from, nothing left to do,
            another run in the folder, a folder or disk that cannot be written, or no run of
            Weights & Biases.
    """
    alone = run_folder.claimed(options.output) if dist.get_rank() == 0 else nullcontext()
    with alone:
        _resume(trainer, options, identity)
        first = trainer.num_steps + 1
        if first > options.steps:
            raise UserError(
                f"--steps {options.steps}: the run is at step {trainer.num_steps} already; give"
                " more"
            )
        metrics = options.output / run_folder.METRICS
        summary = Summary(first, options.steps, str(options.output), str(metrics))
        if options.save_every:
            checkpoint.check_saving(options.output)
        writer = None
        if dist.get_rank() == 0:
            writer = MetricsWriter(options.output, first, options.wandb_project)
        try:
            if writer is not None:
                writer.begin()
            steps = _train(trainer, options, identity, show, summary, writer)
        finally:
            if writer is not None:
                writer.close()
    summary.last_step, summary.skipped_updates = trainer.num_steps, trainer.updater.skipped
    summary.stock_attention, summary.prefix_attention = attention_of(trainer.chunks)
    _fill(summary, steps)
    return summary


def _train(
    trainer: Trainer,
    options: RunOptions,
    identity: Identity,
    show: Callable[[CompletedStep], None],
    summary: Summary,
    writer: MetricsWriter | None,
) -> list[CompletedStep]:
    """Steps and checkpoints up to `options.steps`, or the first error of the training itself."""
    steps: list[CompletedStep] = []
    try:
        while trainer.num_steps < options.steps:
            step = trainer.step()
            steps.append(step)
            if writer is not None:
                writer.write(step.number, step.metrics)
            show(step)
            last = step.number == options.steps
            if options.save_every and (last or step.number % options.save_every == 0):
                summary.checkpoint = str(checkpoint.save(trainer, options.output, identity))
    except TrainingError as error:
        summary.error = str(error)
        if writer is not None:
            failed: Metrics = {"train/skipped_updates": trainer.updater.skipped}
            writer.write(trainer.num_steps + 1, failed)
    return steps


def _resume(trainer: Trainer, options: RunOptions, identity: Identity) -> None:
    if options.resume is None:
        run_folder.check_unused(options.output, overwrite=options.overwrite)
        return
    auto = options.resume == "auto"
    if auto and not options.output.exists():
        return
    folder = run_folder.find(options.output if auto else Path(options.resume))
    if folder is not None:
        if options.output.resolve() not in folder.resolve().parents:
            run_folder.check_unused(options.output, overwrite=options.overwrite)
        checkpoint.load(trainer, folder, identity)
        logger.info("resumed from %s", folder)
    elif not auto:
        raise UserError(f"--resume {options.resume}: holds no checkpoint; name one that does")
    else:
        run_folder.check_unused(options.output, overwrite=options.overwrite)


def _fill(summary: Summary, steps: list[CompletedStep]) -> None:
    """Fills the summary with the results of the steps."""
    if not steps:
        return

    def values(name: str) -> list[Any]:
        return [step.metrics[name] for step in steps if name in step.metrics]

    summary.raw_tokens = sum(values("prefix_sharing/raw_tokens"))
    summary.executed_tokens = sum(values("prefix_sharing/executed_tokens"))
    for name in ("loss", "reward_mean", "grad_norm"):
        setattr(summary, name, values(f"train/{name}")[-1])
    summary.step_s = statistics.median(values("train/updates_s"))
    differences = {
        f"step {step.number}, update {number}": update.difference
        for step in steps
        for number, update in enumerate(step.updates, start=1)
        if update.difference is not None
    }
    if not differences:
        return
    summary.stock_step_s = statistics.median(values("prefix_sharing/stock_updates_s"))
    summary.speedup = summary.stock_step_s / summary.step_s
    verdict = compare.merged(differences)
    for name in COMPARED:
        setattr(summary, name, getattr(verdict, name))
    summary.failures = list(verdict.failures)
