"""Routers' ledgers of a step in which segments cross data-parallel ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_prefix.features.across.span_sums import SpanSums
from megatron_prefix.features.experts.group_counts import GroupCounts
from megatron_prefix.features.experts.ledger import LOGGED_AS, SUMS, RouterLedger
from megatron_prefix.features.experts.tokens import LogicalTokens


class CrossingLedger(RouterLedger):
    """Counts tokens of other ranks' segments, too, and sends the gradients of their sums back.

    Args:
        crossing: segments that cross data-parallel ranks.
        tokens, routers, group_counts, scales: see RouterLedger.
    """

    def __init__(
        self,
        crossing: Collection[int],
        tokens: LogicalTokens,
        routers: Mapping[int, Any],
        group_counts: GroupCounts | None = None,
        scales: Tensor | None = None,
    ) -> None:
        super().__init__(tokens, routers, group_counts, scales)
        num_experts = max((router.num_experts for router in routers.values()), default=0)
        self._spans = SpanSums(crossing, routers, num_experts)
        self._sent_back = SpanSums(crossing, routers, num_experts)

    def leaving(self, index: int, spans: Sequence[int]) -> tuple[Tensor, ...]:
        """What routers have counted in some spans of a segment, for another rank."""
        return self._spans.rows(index, spans)

    @torch.no_grad()
    def arrived(self, index: int, rows: Sequence[Tensor]) -> None:
        """Counts the tokens of another rank's segment, which has `leaving` from there."""
        if not rows:
            return
        tokens = self._tokens[index]
        num = len(tokens.copies) - 1
        self._spans.add(index, num, range(num), rows)
        for layer, router in self._routers.items():
            counted = {name: self._spans.get(layer, index, name) for name in ("routed", *SUMS)}
            if router.enable_expert_bias:
                copies = tokens.copies[:-1].unsqueeze(1)
                router.local_tokens_per_expert += (counted["routed"] * copies).sum(0)  # type: ignore[operator]
            if not _is_counted(router):
                continue
            state = self._layer(layer, router.weight)
            for name in SUMS:
                total, by_span = getattr(state, name), counted[name].squeeze(-1)  # type: ignore[union-attr]
                total.index_add_(0, tokens.rollout, by_span[tokens.span].to(total.dtype))
            self._counted(layer, state, tokens)

    @torch.no_grad()
    def sums(self, index: int) -> tuple[Tensor, ...]:
        """Gradients of what has `arrived`, in its columns; () if nothing has."""
        spans = range(len(self._tokens[index].copies) - 1)
        gradients = SpanSums((), self._routers, self._spans.num_experts)
        zeros = [*map(torch.zeros_like, self._spans.rows(index, spans))]
        gradients.add(index, len(spans), spans, zeros)
        for layer in self._layers if zeros else ():
            for name, by_span in self._of_losses(layer, index).items():
                gradients.put(layer, index, name, by_span[:-1])
        return gradients.rows(index, spans)

    def add_to(self, index: int, spans: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Adds gradients of what has left; see `sums`."""
        self._sent_back.add(index, len(self._tokens[index].copies) - 1, spans, rows)

    def _note(self, layer: int, index: int, name: str, by_span: Tensor) -> None:
        if index in self._spans:
            self._spans.put(layer, index, name, by_span[:-1])

    def _by_span(self, layer: int, index: int) -> dict[str, Tensor]:
        by_name = super()._by_span(layer, index)
        for name, by_span in by_name.items():
            back = self._sent_back.get(layer, index, name)
            if back is not None:
                by_span[:-1] += back.view_as(by_span[:-1]).to(by_span.dtype)
        return by_name


def _is_counted(router: Any) -> bool:
    """Whether a router's tokens are counted for a loss."""
    balanced = any(router.get_aux_loss_coeff(kind) for kind in LOGGED_AS)
    return balanced or router.config.moe_z_loss_coeff is not None
