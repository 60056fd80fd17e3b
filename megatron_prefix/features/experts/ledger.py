"""Routers' counts during a step, and the gradients of the auxiliary losses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.errors import refused
from megatron_prefix.features.experts.group_counts import GroupCounts
from megatron_prefix.features.experts.routers import (
    global_loss_is_whole,
    sample_losses_weigh_batch,
    unscaled,
)
from megatron_prefix.features.experts.tokens import Closing, LogicalTokens, SegmentTokens
from megatron_prefix.refusals.table import UNEVEN_SAMPLES

LOGGED_AS = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Megatron's moe_router_load_balancing_type, and the name under which it logs the loss."""
SUMS = ("counts", "masses", "squares")
"""Of a `_Layer`."""


@dataclass
class _Layer:
    """One router during one step; sums are by rollout, over this rank's tokens.

    Attributes:
        counts: tokens sent to each expert, [rollouts, experts].
        masses: sum of the tokens' scores, [rollouts, experts].
        squares: sum of the squared logsumexp of the tokens' logits, [rollouts].
        scores_gradient: gradient of the scores of any token of a rollout, [rollouts, experts].
        squares_gradient: gradient of its square, [rollouts].
        uncounted: per microbatch the tokens that have not been counted.
        averages: per microbatch the average of the global batch's counts up to it, [experts].
    """

    counts: Tensor
    masses: Tensor
    squares: Tensor
    scores_gradient: Tensor
    squares_gradient: Tensor
    uncounted: list[int]
    counted: set[int] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)
    averages: list[Tensor] = field(default_factory=list)


class RouterLedger:
    """All routers of a model chunk during one step.

    Args:
        scales: by which each microbatch's losses are multiplied, [microbatches], where they may
            differ: filled in before a backward reads them. None: what Megatron's schedule has set.

    Raises:
        UserError: seq_aux_loss with samples of different lengths in a microbatch.
    """

    def __init__(
        self,
        tokens: LogicalTokens,
        routers: Mapping[int, Any],
        group_counts: GroupCounts | None = None,
        scales: Tensor | None = None,
    ) -> None:
        self._tokens, self._routers, self._scales = tokens, routers, scales
        self._group_counts = group_counts or GroupCounts()
        self._places = {
            layer: self._group_counts.enter(router)
            for layer, router in routers.items()
            if router.get_aux_loss_coeff("global_aux_loss")
        }
        self._layers: dict[int, _Layer] = {}
        by_sample = any(r.get_aux_loss_coeff("seq_aux_loss") for r in routers.values())
        if by_sample and not tokens.has_even_samples:
            raise refused(UNEVEN_SAMPLES)

    def clear(self) -> None:
        """Ends the step. A module that keeps a tensor of a segment keeps its graph, and with that
        this ledger: it must not hold the model, as no collector sees cycles through a graph."""
        self._routers = {}
        self._layers.clear()

    def spans(self, layer: int, index: int, num_tokens: int) -> Tensor:
        """Spans of those tokens of a segment that this rank's router sees, int64 [num_tokens]."""
        span_of = self._tokens[index].span_of
        parts = len(span_of) // num_tokens  # above 1 under sequence parallelism
        return span_of if parts == 1 else span_of.chunk(parts)[self._routers[layer].tp_group.rank()]

    @torch.no_grad()
    def route(self, layer: int, index: int, routing_map: Tensor) -> Tensor:
        """Tokens that a segment stands for, by the experts that get them, [experts]."""
        tokens, span_of = self._tokens[index], self.spans(layer, index, len(routing_map))
        shape = len(tokens.copies), routing_map.shape[1]
        by_span = routing_map.new_zeros(shape, dtype=torch.float32)
        by_span.index_add_(0, span_of, routing_map.to(by_span.dtype))
        self._note(layer, index, "routed", by_span)
        return (by_span * tokens.copies.unsqueeze(1)).sum(0)

    @torch.no_grad()
    def count(
        self,
        layer: int,
        index: int,
        experts: Tensor | None,
        scores: Tensor | None,
        squares: Tensor | None,
    ) -> None:
        """Counts a segment's tokens; a second call, by recomputation, changes nothing.

        Args:
            experts: where the largest scores are, bool [tokens, experts]; None without a
                load-balancing loss.
            scores: [tokens, experts]; None likewise.
            squares: squared logsumexp of the logits, [tokens]; None without z-loss.
        """
        like = scores if squares is None else squares
        if like is None:
            raise RuntimeError(f"layer {layer}: nothing to count")
        state = self._layer(layer, like)
        if index in state.counted:
            return
        state.counted.add(index)
        tokens, span_of = self._tokens[index], self.spans(layer, index, len(like))
        statistics = {"counts": experts, "masses": scores, "squares": squares}
        for name, values in statistics.items():
            if values is not None:
                total = getattr(state, name)
                by_span = total.new_zeros((len(tokens.copies), *total.shape[1:]))
                by_span.index_add_(0, span_of, values.to(total.dtype))
                total.index_add_(0, tokens.rollout, by_span[tokens.span])
                self._note(layer, index, name, by_span)
        self._counted(layer, state, tokens)

    def _counted(self, layer: int, state: _Layer, tokens: SegmentTokens) -> None:
        for microbatch, number in tokens.numbers.items():
            state.uncounted[microbatch] -= number
            if layer in self._places and not state.uncounted[microbatch]:
                counts = state.counts[self._tokens.closing((microbatch,)).rollout].sum(0)
                self._group_counts.add(self._places[layer], microbatch, counts)

    @torch.no_grad()
    def gradients(self, layer: int, index: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Gradients of the step's losses with respect to a segment's scores and squares.

        Raises:
            RuntimeError: a token of one of its microbatches has not been counted yet.
        """
        by_name = self._by_span(layer, index)
        span_of = self.spans(layer, index, num_tokens)
        return by_name["masses"][span_of], by_name["squares"][span_of]

    def _note(self, layer: int, index: int, name: str, by_span: Tensor) -> None:
        """A segment's sums, [spans + 1, ...], the last of padding: "routed" or one of `SUMS`."""

    def _by_span(self, layer: int, index: int) -> dict[str, Tensor]:
        """Gradients of the step's losses with respect to a segment's sums, [spans + 1, ...]."""
        return self._of_losses(layer, index)

    def _of_losses(self, layer: int, index: int) -> dict[str, Tensor]:
        state, tokens = self._layers[layer], self._tokens[index]
        self._close(layer, tuple(sorted(set(tokens.numbers) - state.closed)))
        by_rollout = {"masses": state.scores_gradient, "squares": state.squares_gradient}
        return {
            name: values.new_zeros((len(tokens.copies), *values.shape[1:]))
            .index_add_(0, tokens.span, values[tokens.rollout])
            for name, values in by_rollout.items()
        }  # fmt: skip

    def _layer(self, layer: int, like: Tensor) -> _Layer:
        if layer not in self._layers:
            shape = self._tokens.num_rollouts, self._routers[layer].num_experts
            dtype = torch.promote_types(like.dtype, torch.float32)  # exact for counts up to 2^24
            counts, masses, scores = like.new_zeros((3, *shape), dtype=dtype)
            squares, squares_gradient = like.new_zeros((2, shape[0]), dtype=dtype)
            self._layers[layer] = _Layer(
                counts, masses, squares, scores, squares_gradient, self._tokens.num_tokens
            )
        return self._layers[layer]

    def _close(self, layer: int, microbatches: tuple[int, ...]) -> None:
        """Logs the losses of microbatches and computes their gradients."""
        if not microbatches:
            return
        state, router = self._layers[layer], self._routers[layer]
        if early := [m for m in microbatches if state.uncounted[m]]:
            raise RuntimeError(
                f"layer {layer}: microbatches {early} have tokens that were not counted"
            )
        state.closed.update(microbatches)
        closing = self._tokens.closing(microbatches)
        counts, squares = state.counts[closing.rollout], state.squares[closing.rollout]
        sums = torch.cat([counts, squares.unsqueeze(1)], 1)
        if router.tp_cp_group.size() > 1:
            dist.all_reduce(sums, group=router.tp_cp_group)
        masses = state.masses[closing.rollout]  # this rank's: Megatron logs its part of the loss
        with contextlib.nullcontext() if self._scales is None else unscaled():
            for kind in LOGGED_AS:
                if coeff := router.get_aux_loss_coeff(kind):
                    closed = sums[:, :-1]
                    if kind == "global_aux_loss":
                        closed = self._averages(layer, microbatches)[closing.place].to(sums.dtype)
                    vectors = _balance(router, kind, coeff, closed, masses, closing)
                    vectors = self._scaled(vectors, closing).to(sums.dtype)
                    state.scores_gradient[closing.rollout] += vectors
            if router.config.moe_z_loss_coeff is not None:
                weights = self._scaled(_shrink(router, sums[:, -1], closing), closing)
                state.squares_gradient[closing.rollout] = weights.to(sums.dtype)

    def _scaled(self, gradients: Tensor, closing: Closing) -> Tensor:
        if self._scales is None:
            return gradients
        scales = self._scales[closing.microbatch]
        return gradients * scales.view(-1, *(1 for _ in gradients.shape[1:]))

    def _averages(self, layer: int, microbatches: tuple[int, ...]) -> Tensor:
        """The counts that Megatron uses in these microbatches, [microbatches, experts].

        Its routers keep running sums, in order, since their last reset
        (megatron/core/transformer/moe/router.py, `_apply_global_aux_loss`).
        """
        state, router = self._layers[layer], self._routers[layer]
        for microbatch in range(len(state.averages), microbatches[-1] + 1):
            counts = self._group_counts.take(self._places[layer], microbatch)
            router.global_tokens_per_expert += counts
            router.ga_steps += 1
            state.averages.append(router.global_tokens_per_expert / router.ga_steps)
        return torch.stack([state.averages[microbatch] for microbatch in microbatches])


def _balance(
    router: Any, kind: str, coeff: float, counts: Tensor, masses: Tensor, closing: Closing
) -> Tensor:
    """Gradient of a load-balancing loss with respect to the scores of each rollout's tokens.

    Args:
        counts, masses: of the rollouts, [n, experts]; counts are over all ranks of the microbatch,
            or those of the global batch.

    Returns:
        [n, experts].
    """
    tokens = weighed = closing.tokens.to(counts.dtype)
    share = torch.ones_like(tokens)
    by_place = torch.zeros_like(counts).index_add_(0, closing.place, counts)[closing.place]
    if kind == "seq_aux_loss":  # each sample alone, then the mean; a pack is one (Megatron's rows)
        counts = torch.where((closing.samples == 1).unsqueeze(1), by_place, counts)
        share = 1 / closing.samples.to(counts.dtype)
        tokens = tokens * share
        weighed = weighed if sample_losses_weigh_batch() else tokens
    elif kind == "aux_loss":
        counts = by_place
    group, form = router.tp_cp_group, {}
    if kind == "global_aux_loss":
        group, form = router.tp_dp_cp_group, global_loss_is_whole(router)
        # Megatron assumes that all ranks of the group have equally many.
        tokens = tokens * (group.size() // router.tp_cp_group.size())
    factor = coeff * router.num_experts / router.topk
    unit = counts * (factor * share / tokens.square()).unsqueeze(1)

    def attach(loss: Tensor) -> Tensor:
        return router.attach_and_log_load_balancing_loss(
            loss.new_zeros(1), coeff, loss, LOGGED_AS[kind], group, valid_token_count=1, **form
        )

    weight = _weight(attach, (unit * masses).sum())
    if router.calculate_per_token_loss:
        weight = (weight * weighed / router.tp_cp_group.size()).unsqueeze(1)
    return unit * weight


def _shrink(router: Any, squares: Tensor, closing: Closing) -> Tensor:
    """Gradient of the z-loss with respect to the squares of each rollout's tokens, [n].

    Args:
        squares: of the rollouts, [n], over all ranks of the microbatch.
    """

    def attach(loss: Tensor) -> Tensor:
        # A token whose only logit is x has the z-loss x^2.
        return type(router).apply_z_loss(router, loss.sqrt().view(1, 1))

    tokens = closing.tokens.to(squares.dtype)
    weight = _weight(attach, (squares / tokens).sum())
    local_tokens = tokens / router.tp_cp_group.size()
    # Megatron takes the mean over a rank's tokens; a per-token loss is weighted with their number.
    return weight.expand_as(squares) if router.calculate_per_token_loss else weight / local_tokens


def _weight(attach: Callable[[Tensor], Tensor], loss: Tensor) -> Tensor:
    """Weight of a loss in the total, [1]: the gradient that Megatron attaches to it."""
    with torch.enable_grad():
        leaf = loss.detach().view(1).requires_grad_()
        carrier = attach(leaf.sum())
    return torch.autograd.grad(carrier, leaf, torch.zeros_like(carrier))[0]
