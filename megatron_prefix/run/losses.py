"""Losses on the last stage: the trainer's own, one call a microbatch of its own.

The outputs of scored segments are detached leaves.  When the last segment of a microbatch has been
through, the outputs along its rollouts' paths are joined and the trainer's forward step and loss
run on them.  Their backward leaves in every leaf the sum of what all microbatches send it, and that
is the cotangent with which the segment's own backward starts: the same superposition as for gK/gV,
applied to the outputs ("Schedule-Level Shared-Prefix Reuse for LLM RL Training", appendix A.5, the
direct adjoints of prefix tokens).

With context parallelism the ranks share the rows of every segment, and every microbatch, but not
along the same lines: a segment is cut zig-zag by itself, a microbatch as a whole.  So leaves are
whole outputs, gathered when a segment has run, and a microbatch takes its rank's positions of the
joined outputs; what reaches a leaf on any rank is added up before the segment's backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from torch import Tensor

from megatron_prefix.megatron.install import Hooks
from megatron_prefix.run.batch import BatchAdapter, join
from megatron_prefix.run.step import Step
from megatron_prefix.sidecar.context_parallel import Exchange
from megatron_prefix.tree import cp_layout


@dataclass(frozen=True)
class LossContract:
    """What of Megatron's schedule arguments the loss needs.

    Attributes:
        forward_step_func: the trainer's.
        config: the model's configuration.
        cp_size: context parallel size.
        collect_non_loss_data: see Megatron's schedules.
    """

    forward_step_func: Callable[..., Any]
    config: Any
    cp_size: int
    collect_non_loss_data: bool


def set_auxiliary_scales(contract: LossContract, model: Any, num_microbatches: int) -> None:
    """Tells Megatron how to weigh auxiliary losses, as a stage without losses does in its schedule.

    The scales are read when a backward runs, on every stage, and only the last has a `Scorer`.
    """
    config = contract.config
    if config.timers is not None:
        config.timers("forward-compute", log_level=2).start()
    forward_step_calc_loss(
        model, next(model.parameters()), None, config, getattr(model, "vp_stage", None),
        contract.collect_non_loss_data, max(num_microbatches, 1), [], contract.cp_size, False,
    )  # fmt: skip


class Scorer:
    """Turns outputs of segments into losses, and losses into cotangents of the outputs.

    Args:
        step: the step's segments and the trainer's microbatches.
        contract: how losses are made.
        adapter: knows the microbatches' form.
        model: the model chunk as the trainer knows it.
        hooks: its hooks.
        exchange: between context-parallel ranks; None where there is one.
    """

    def __init__(
        self,
        step: Step,
        contract: LossContract,
        adapter: BatchAdapter,
        model: Any,
        hooks: Hooks,
        exchange: Exchange | None = None,
    ) -> None:
        self._step, self._forest, self._contract = step, step.forest, contract
        self._exchange = exchange
        self._adapter, self._model, self._hooks = adapter, model, hooks
        self._leaves: dict[int, Tensor] = {}
        self._rows: dict[int, list[Tensor]] = {}
        self._losses: dict[int, Tensor] = {}
        self._stores: list[list[Any]] = [[] for _ in range(step.num_microbatches)]
        self.num_tokens: int | Tensor = 0
        self._rollouts: list[list[int]] = [[] for _ in range(step.num_microbatches)]
        for rollout, microbatch in enumerate(step.microbatch_of):
            self._rollouts[microbatch].append(rollout)
        self._closing: dict[int, list[int]] = {}
        for microbatch, rollouts in enumerate(self._rollouts):
            last = max(step.forest.paths[rollout][-1][0] for rollout in rollouts)
            self._closing.setdefault(last, []).append(microbatch)

    @property
    def forward_data_store(self) -> list[Any]:
        """What Megatron's schedule returns, in the trainer's order of microbatches."""
        return [entry for store in self._stores for entry in store]

    def take(self, index: int, output: Tensor, *, differentiable: bool) -> None:
        """Takes a scored segment's output [1, rows, ...]; scores the microbatches it closes."""
        rows = self._forest.segments[index].spans
        whole = output.detach()
        if self._exchange is not None:
            whole = self._exchange.whole(whole, [span.padded for span in rows])
        leaf = whole.requires_grad_(differentiable)
        self._leaves[index] = leaf
        # One split for all rows: its backward writes every row's gradient once.
        pieces = leaf.split([span.padded for span in rows], dim=1) if len(rows) > 1 else [leaf]
        self._rows[index] = [
            piece if span.padded == span.length else piece[:, : span.length]
            for piece, span in zip(pieces, rows, strict=True)
        ]
        for microbatch in self._closing.get(index, ()):
            self._score(microbatch)

    def cotangent(self, index: int) -> Tensor:
        """Gradient of all losses with respect to a scored segment's output."""
        rows = self._forest.segments[index].spans
        through = {self._step.microbatch_of[rollout] for span in rows for rollout in span.rollouts}
        losses = [self._losses.pop(m) for m in sorted(through) if m in self._losses]
        if losses:
            torch.autograd.backward(losses)
        leaf = self._leaves[index]
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        if self._exchange is None:
            return gradient
        return self._exchange.share(gradient, [span.padded for span in rows])

    def release(self, index: int) -> None:
        """Drops a segment's output."""
        self._leaves.pop(index, None)
        self._rows.pop(index, None)

    def _score(self, microbatch: int) -> None:
        """Runs the trainer's forward step and loss on one of its microbatches."""
        contract, rollouts = self._contract, self._rollouts[microbatch]
        output, num_cut = self._joined(rollouts)
        shortened = self._adapter.cut(self._step.items[microbatch], num_cut)
        with _timer_of_forward(contract.config):
            with self._hooks.answering(output):
                answer, loss_func = contract.forward_step_func(iter([shortened]), self._model)
            loss, num_tokens = forward_step_calc_loss(
                self._model, answer, loss_func, contract.config,
                getattr(self._model, "vp_stage", None), contract.collect_non_loss_data,
                self._step.num_microbatches, self._stores[microbatch], contract.cp_size, True,
            )  # fmt: skip
        self.num_tokens = self.num_tokens + num_tokens
        if torch.is_grad_enabled() and isinstance(loss, Tensor) and loss.requires_grad:
            scale = contract.config.grad_scale_func
            self._losses[microbatch] = loss if scale is None else scale(loss)

    def _joined(self, rollouts: list[int]) -> tuple[Tensor, int]:
        """A microbatch's output on this rank, and how many of its first positions are cut off."""
        forest, exchange = self._forest, self._exchange
        cut = min(forest.cut(rollout) for rollout in rollouts)
        length = forest.num_positions[rollouts[0]]
        pieces = [self._pieces(rollout) for rollout in rollouts]
        if exchange is None:
            return join(pieces, length - cut), cut
        mine = cp_layout.positions(length, exchange.rank, exchange.size)
        # One position at least is left, so that the trainer's loss has something to look at.
        num_cut = min(int((mine < cut).sum()), len(mine) - 1)
        first = min(cut, int(mine[num_cut]))
        whole = join(pieces, length - first)
        kept = torch.from_numpy(mine[num_cut:] - first).to(whole.device)
        return whole.index_select(1, kept), num_cut

    def _pieces(self, rollout: int) -> list[Tensor]:
        """Outputs along a rollout's path, from the segment with its first trained position on."""
        cut = self._forest.cut(rollout)
        segments = self._forest.segments
        return [
            self._rows[index][row]
            for index, row in self._forest.paths[rollout]
            if segments[index].spans[row].start >= cut
        ]


@contextlib.contextmanager
def _timer_of_forward(config: Any) -> Iterator[None]:
    """Starts the timer that `forward_step_calc_loss` stops; after a failure it can start again."""
    if config.timers is None:
        yield
        return
    timer = config.timers("forward-compute", log_level=2)
    timer.start()
    try:
        yield
    except BaseException:
        timer.reset()
        raise
