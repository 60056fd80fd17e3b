"""Counts of the routers during one step, and the gradients of the auxiliary losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.errors import UserError
from megatron_prefix.moe.group_counts import GroupCounts
from megatron_prefix.moe.tokens import Closing, LogicalTokens
from megatron_prefix.moe.versions import global_loss_is_whole, sample_losses_weigh_batch

LOGGED_AS = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Megatron's moe_router_load_balancing_type, and the name under which it logs that loss."""


@dataclass
class _Layer:
    """One router during one step; sums are by rollout, over the tokens that this rank has.

    Attributes:
        counts: tokens sent to each expert, [rollouts, experts].
        masses: sum of the tokens' scores, [rollouts, experts].
        squares: sum of the squared logsumexp of the tokens' logits, [rollouts].
        scores_gradient: what the scores of any token of a rollout get back, [rollouts, experts].
        squares_gradient: what its square gets back, [rollouts].
        uncounted: tokens of each microbatch that are still to come.
        counted: segments that have been counted.
        closed: microbatches whose gradients are known.
        averages: of the global batch's counts, up to each microbatch in turn, [experts].
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
        tokens: what the step's rows stand for.
        routers: Megatron's routers by layer of the chunk.
        group_counts: of the step, the same for all model chunks of the rank.

    Raises:
        UserError: a loss by sample, and the samples of a microbatch are not equally long.
    """

    def __init__(
        self,
        tokens: LogicalTokens,
        routers: Mapping[int, Any],
        group_counts: GroupCounts | None = None,
    ) -> None:
        self._tokens, self._routers = tokens, routers
        self._group_counts = group_counts or GroupCounts()
        self._places = {
            layer: self._group_counts.enter(router)
            for layer, router in routers.items()
            if router.get_aux_loss_coeff("global_aux_loss")
        }
        self._layers: dict[int, _Layer] = {}
        by_sample = any(r.get_aux_loss_coeff("seq_aux_loss") for r in routers.values())
        if by_sample and not tokens.has_even_samples:
            raise UserError(
                "seq_aux_loss with samples of several lengths in one microbatch: pad them to one"
                " length, or use aux_loss"
            )

    def rows(self, layer: int, index: int, num_tokens: int) -> Tensor:
        """Rows of those tokens of a segment that this rank's router sees, int64 [num_tokens]."""
        row_of = self._tokens[index].row_of
        parts = len(row_of) // num_tokens  # above 1 under sequence parallelism
        return row_of if parts == 1 else row_of.chunk(parts)[self._routers[layer].tp_group.rank()]

    def copies(self, layer: int, index: int, num_tokens: int) -> Tensor:
        """How many rollouts each of these tokens stands for, int64 [num_tokens]; 0 for padding."""
        return self._tokens[index].copies[self.rows(layer, index, num_tokens)]

    @torch.no_grad()
    def count(
        self,
        layer: int,
        index: int,
        experts: Tensor | None,
        scores: Tensor | None,
        squares: Tensor | None,
    ) -> None:
        """Counts a segment's tokens; a second time is activation recompute and changes nothing.

        Args:
            layer: the router's.
            index: the segment.
            experts: where the largest scores are, bool [tokens, experts]; None without such a loss.
            scores: [tokens, experts]; None without such a loss.
            squares: squared logsumexp of the logits, [tokens]; None without z-loss.
        """
        like = scores if squares is None else squares
        if like is None:
            raise RuntimeError(f"layer {layer}: nothing to count")
        if layer not in self._layers:
            self._layers[layer] = self._new_layer(layer, like)
        state = self._layers[layer]
        if index in state.counted:
            return
        state.counted.add(index)
        rows, row_of = self._tokens[index], self.rows(layer, index, len(like))
        sums = ((state.counts, experts), (state.masses, scores), (state.squares, squares))
        for total, values in sums:
            if values is not None:
                by_row = total.new_zeros((len(rows.copies), *total.shape[1:]))
                by_row.index_add_(0, row_of, values.to(total.dtype))
                total.index_add_(0, rows.rollout, by_row[rows.row])
        for microbatch, number in rows.tokens.items():
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
        state, rows = self._layers[layer], self._tokens[index]
        self._close(layer, tuple(sorted(set(rows.tokens) - state.closed)))
        row_of = self.rows(layer, index, num_tokens)

        def of_tokens(by_rollout: Tensor) -> Tensor:
            by_row = by_rollout.new_zeros((len(rows.copies), *by_rollout.shape[1:]))
            return by_row.index_add_(0, rows.row, by_rollout[rows.rollout])[row_of]

        return of_tokens(state.scores_gradient), of_tokens(state.squares_gradient)

    def _new_layer(self, layer: int, like: Tensor) -> _Layer:
        num_rollouts, num_experts = self._tokens.num_rollouts, self._routers[layer].num_experts
        dtype = torch.promote_types(like.dtype, torch.float32)  # exact for counts up to 2^24
        counts, masses, scores = like.new_zeros((3, num_rollouts, num_experts), dtype=dtype)
        squares, squares_gradient = like.new_zeros((2, num_rollouts), dtype=dtype)
        return _Layer(counts, masses, squares, scores, squares_gradient, self._tokens.num_tokens)

    def _close(self, layer: int, microbatches: tuple[int, ...]) -> None:
        """Logs the losses of microbatches and finds their gradients."""
        if not microbatches:
            return
        state, router = self._layers[layer], self._routers[layer]
        if early := [m for m in microbatches if state.uncounted[m]]:
            raise RuntimeError(f"layer {layer}: microbatches {early} have tokens still to come")
        state.closed.update(microbatches)
        closing = self._tokens.closing(microbatches)
        counts, squares = state.counts[closing.rollout], state.squares[closing.rollout]
        sums = torch.cat([counts, squares.unsqueeze(1)], 1)
        if router.tp_cp_group.size() > 1:
            dist.all_reduce(sums, group=router.tp_cp_group)
        masses = state.masses[closing.rollout]  # of this rank: Megatron logs its part of the loss
        for kind in LOGGED_AS:
            if coeff := router.get_aux_loss_coeff(kind):
                seen = sums[:, :-1]
                if kind == "global_aux_loss":
                    seen = self._averages(layer, microbatches)[closing.place].to(sums.dtype)
                vectors = _balance(router, kind, coeff, seen, masses, closing)
                state.scores_gradient[closing.rollout] += vectors.to(sums.dtype)
        if router.config.moe_z_loss_coeff is not None:
            weights = _shrink(router, sums[:, -1], closing)
            state.squares_gradient[closing.rollout] = weights.to(sums.dtype)

    def _averages(self, layer: int, microbatches: tuple[int, ...]) -> Tensor:
        """What Megatron has for counts in these microbatches, [microbatches, experts].

        Its routers add up since they were last reset, in order, in buffers of their own
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
        counts, masses: of the closing rollouts, [n, experts]; counts over all ranks of the
            microbatch, or for each rollout those of the global batch.

    Returns:
        [n, experts].
    """
    tokens = weighed = closing.tokens.to(counts.dtype)
    share = torch.ones_like(tokens)
    if kind == "seq_aux_loss":  # every sample by itself, and then the mean over the samples
        share = 1 / closing.samples.to(counts.dtype)
        tokens = tokens * share
        weighed = weighed if sample_losses_weigh_batch() else tokens
    elif kind == "aux_loss":
        counts = torch.zeros_like(counts).index_add_(0, closing.place, counts)[closing.place]
    group, form = router.tp_cp_group, {}
    if kind == "global_aux_loss":
        group, form = router.tp_dp_cp_group, global_loss_is_whole(router)
        # Megatron takes it that the group's ranks have equally many.
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
        squares: of the closing rollouts, [n], over all ranks of the microbatch.
    """

    def attach(loss: Tensor) -> Tensor:
        # A token whose only logit is x has the z-loss x^2.
        return type(router).apply_z_loss(router, loss.sqrt().view(1, 1))

    tokens = closing.tokens.to(squares.dtype)
    weight = _weight(attach, (squares / tokens).sum())
    local_tokens = tokens / router.tp_cp_group.size()
    # Megatron takes the mean over a rank's tokens; per-token losses are weighed with their number.
    return weight.expand_as(squares) if router.calculate_per_token_loss else weight / local_tokens


def _weight(attach: Callable[[Tensor], Tensor], loss: Tensor) -> Tensor:
    """Factor of a loss in the total, [1]: Megatron logs it, attaches it, and says its gradient."""
    with torch.enable_grad():
        leaf = loss.detach().view(1).requires_grad_()
        carrier = attach(leaf.sum())
    return torch.autograd.grad(carrier, leaf, torch.zeros_like(carrier))[0]
