"""One optimizer update over microbatches: forward, backward, optimizer step; and its comparison."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_prefix.lab.numerics import compare
from megatron_prefix.lab.rl import passes, report_numbers, snapshot
from megatron_prefix.lab.rl.flops import of_microbatches, of_report
from megatron_prefix.lab.rl.loss import forward_step
from megatron_prefix.lab.rl.passes import Microbatch
from megatron_prefix.lab.rl.settings import TrainSettings
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.run.schedule import PrefixSchedule

logger = logging.getLogger(__name__)


class TrainingError(RuntimeError):
    """Training cannot go on: loss or gradient is not finite. One line, for people."""


@dataclass(frozen=True)
class Update:
    """One optimizer update.

    Attributes:
        means: of the loss's logs over the trained tokens of all ranks.
        grad_norm: of the whole gradient, before clipping.
        num_zeros: elements of the gradient that are exactly zero.
        seconds: forward, backward and optimizer step.
        raw_tokens: positions of this rank's microbatches, of all context-parallel ranks.
        executed_tokens: positions that the schedule computed for them.
        logical_flops: of this data-parallel rank's rollouts, forward and backward; see flops.py.
        executed_flops: of what the schedule computed for them.
        phases: see `report_numbers.phases`; empty if the stock schedule ran.
        skipped: loss or gradient was not finite, the weights are as before.
        outcome: what a comparison looks at, None without one.
        difference: from the stock schedule's update, None without a comparison.
        stock_seconds: `seconds` of the stock schedule, None without a comparison.
    """

    means: dict[str, float]
    grad_norm: float
    num_zeros: float
    seconds: float
    raw_tokens: int
    executed_tokens: int
    logical_flops: float
    executed_flops: float
    phases: dict[str, float]
    skipped: bool
    outcome: compare.Trace | None = None
    difference: compare.Verdict | None = None
    stock_seconds: float | None = None


class Updater:
    """Makes updates, and counts those that had to be skipped.

    Args:
        chunks: this rank's model, wrapped in DDP.
        optimizer: Megatron's.
        schedule: makes forward and backward.
        settings: of the run.
        device: of the model.
        cost: of the model.

    Attributes:
        skipped: updates skipped so far.
        skipped_in_a_row: the last ones of them.
    """

    def __init__(
        self,
        chunks: list[Any],
        optimizer: Any,
        schedule: PrefixSchedule,
        settings: TrainSettings,
        device: torch.device,
        cost: CostModel,
    ) -> None:
        self._cost = cost
        self._chunks, self._optimizer, self._schedule = chunks, optimizer, schedule
        self._settings, self._device = settings, device
        self._stock = PrefixSchedule(replace(schedule.config, mode="off"))
        self.skipped = self.skipped_in_a_row = 0

    def update(self, items: Sequence[Microbatch], weight: float, step: int) -> Update:
        """One update; if the run compares, the stock schedule's comes first and is taken back.

        Args:
            items: this rank's microbatches.
            weight: factor of their losses.
            step: number of the step, from 1.

        Raises:
            TrainingError: more updates in a row skipped than allowed.
        """
        self._set_lr(self._settings.lr_at(step))
        if self._settings.compare:
            update = self._compared(items, weight, step)
        else:
            update = self._run(self._schedule, items, weight)
        self._count(update, step)
        return update

    def _compared(self, items: Sequence[Microbatch], weight: float, step: int) -> Update:
        before = snapshot.Snapshot(self._chunks, self._optimizer)
        stock = self._run(self._stock, items, weight, record=True)
        before.restore()
        ours = self._run(self._schedule, items, weight, record=True)
        if stock.outcome is None or ours.outcome is None:
            raise RuntimeError("an update was run for a comparison and recorded nothing")
        settings = self._settings
        conditions = snapshot.conditions(
            self._chunks,
            items,
            tokens=ours.raw_tokens * parallel_state.get_data_parallel_world_size(),
            lr=settings.lr_at(step),
            eps=settings.adam_eps,
            kl_coeff=settings.grpo.kl_coeff,
            may_vanish=True,
        )
        mine = compare.compare(stock.outcome, ours.outcome, conditions)
        difference = compare.over_ranks(compare.on_all_ranks(mine))
        return replace(ours, outcome=None, difference=difference, stock_seconds=stock.seconds)

    def _run(
        self,
        schedule: PrefixSchedule,
        items: Sequence[Microbatch],
        weight: float,
        record: bool = False,
    ) -> Update:
        """Forward, backward, and the optimizer step if everything is finite."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        begin = now(self._device)
        loss = forward_step(self._settings.grpo, weight=weight)
        logs = passes.run(schedule, loss, self._chunks, items)
        seconds = now(self._device) - begin
        gradients = snapshot.gradients(self._chunks) if record else {}
        begin = now(self._device)
        names = self._settings.log_names
        means = passes.mean_over_ranks(passes.log_sums(logs), names, self._device)
        norm, zeros, skipped = self._apply(means["loss"])
        seconds += now(self._device) - begin
        size = parallel_state.get_context_parallel_world_size()
        raw = size * sum(item["tokens"].numel() for item in items)
        report = schedule.report
        flops = executed_flops = of_microbatches(self._cost, items, size)
        executed, phases = raw, {}
        if report and report.decision.share:
            executed, phases = report.forest.executed_tokens, report_numbers.phases(report)
            executed_flops = of_report(self._cost, report)
        outcome = None
        if record:
            after = snapshot.parameters(self._chunks)
            outcome = compare.Trace(snapshot.losses(logs), gradients, after)
        return Update(
            means, norm, zeros, seconds, raw, executed, flops, executed_flops, phases, skipped,
            outcome,
        )  # fmt: skip

    def _apply(self, loss: float) -> tuple[float, float, bool]:
        """The optimizer step, unless loss or gradient is not finite.

        Megatron's own step clips by the norm and goes on, so the norm is looked at before.
        """
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        with warnings.catch_warnings():
            # The distributed optimizer's parameters are views, and have the gradient all the same.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
            zeros = float(self._optimizer.count_zeros())
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self._optimizer.step()
        return norm, zeros, not finite

    def _set_lr(self, lr: float) -> None:
        """Learning rate and weight decay by parameter group, as Megatron's scheduler sets them."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self._settings.weight_decay * group.get("wd_mult", 1.0)

    def _count(self, update: Update, step: int) -> None:
        if not update.skipped:
            self.skipped_in_a_row = 0
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        what = (
            f"step {step}: loss {update.means['loss']:g}, gradient norm {update.grad_norm:g}: not "
            f"finite, update skipped"
        )
        logger.error("%s", what)
        if self.skipped_in_a_row > self._settings.max_skipped:
            raise TrainingError(
                f"{what} ({self.skipped_in_a_row} in a row, --max-skipped "
                f"{self._settings.max_skipped}); lower --lr, or look at the rewards and old "
                "log-probs of these rollouts"
            )


def now(device: torch.device) -> float:
    """Seconds, after the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
