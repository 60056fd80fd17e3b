"""The loss of an indexer: how far its scores of keys are from attention to them.

Megatron adds for every query the divergence of the indexer's probabilities from those of attention,
averaged over heads: of the keys that were chosen (`dsa_indexer_use_sparse_loss`), or of all that
the query sees. A microbatch's loss is the mean over its rows, padding included, times
`dsa_indexer_loss_coeff`. So a row of a segment counts by the sum of what it weighs in the
microbatches of its rollouts. That is known before the step, so nothing waits. Only the indexer is
trained: queries and keys of attention, and the indexer's inputs, are detached. Gradients of index
keys go to ancestors as those of latents do.

Divergences are computed in the backward, where each row comes once, whatever runs again; their sum
is logged when the step is good. The arithmetic is that of `compute_dsa_indexer_loss` in
megatron/core/transformer/experimental_attention_variant/dsa.py, which 0.19 has changed.
("DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", section 2.1.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.errors import Reason, refused
from megatron_prefix.features.experts.tokens import LogicalTokens
from megatron_prefix.layers.releases import is_since
from megatron_prefix.parts import Attempt, StepPart
from megatron_prefix.refusals.table import DSA_LOSS
from megatron_prefix.run.execute.auxiliary import set_auxiliary_scales
from megatron_prefix.run.read.suspend import Capture
from megatron_prefix.sidecar.arena import wider

_LEAST = 1e-10
"""Megatron's: what logarithms take at least, or add."""


class IndexerLoss(StepPart):
    """The losses of a rank's indexers in a step with gradients."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._tokens: LogicalTokens | None = None
        self._weights = torch.zeros(0)
        self._losses: dict[Any, Tensor] = {}

    def refusals(self) -> Iterator[Reason]:
        """See StepPart."""
        if self.rank.model.looks_ahead:
            yield DSA_LOSS.given("multi-token prediction")
        if self.rank.scale_functions and is_since("0.19"):  # before, nothing scales this loss
            yield DSA_LOSS.given("a grad_scale_func of the trainer's own")
        named = (pair for model in self.rank.language_models for pair in model.named_parameters())
        if any(".indexer." in name and not weight.requires_grad for name, weight in named):
            yield DSA_LOSS.given("frozen weights of the indexer")

    def read(self, capture: Capture) -> None:
        """See StepPart."""
        packings = [call["packed_seq_params"] for call in capture.calls(0)]
        if any(getattr(packing, "real_token_mask_q", None) is not None for packing in packings):
            raise refused(DSA_LOSS, "real_token_mask_q of a pack")

    def begin(self, attempt: Attempt) -> None:
        """See StepPart; stages without losses are told how to scale this one."""
        step, config = attempt.step, self.rank.config
        cp = self.rank.groups.cp
        tokens = LogicalTokens(
            step.forest, step.microbatch_of, self.rank.device, cp.rank(), cp.size(), step.packed
        )
        is_sum = config.calculate_per_token_loss and is_since("0.19")
        rows = [1 if is_sum else tokens.num_tokens[number] for number in step.microbatch_of]
        coefficients = [config.dsa_indexer_loss_coeff / num for num in rows]
        self._tokens, self._losses = tokens, {}
        self._weights = torch.tensor(coefficients, dtype=torch.float64).to(self.rank.device)
        set_auxiliary_scales(attempt.contract, self.rank.models[-1], step.num_microbatches)

    def end(self) -> None:
        """See StepPart."""
        self._tokens = None

    def weights(self, index: int) -> Tensor:
        """What each position of a segment weighs in the losses, float64 [positions]."""
        if self._tokens is None:
            raise RuntimeError("no step runs")
        tokens = self._tokens[index]
        by_span = self._weights.new_zeros(len(tokens.copies))
        by_span.index_add_(0, tokens.span, self._weights[tokens.rollout])
        return by_span[tokens.span_of]

    def add(self, core: Any, loss: Tensor) -> None:
        """Takes what some rows of a layer's core attention give to its loss."""
        self._losses[core] = loss + self._losses[core] if core in self._losses else loss

    def finished(self) -> None:
        """See StepPart: logs."""
        from megatron.core.transformer.experimental_attention_variant.dsa import (
            DSAIndexerLossLoggingHelper as Log,
        )

        for core, loss in self._losses.items():
            Log.save_loss_to_tracker(
                loss=loss, layer_number=core.layer_number, num_layers=core.config.num_layers
            )
        self._losses = {}


def loss_of(parts: Iterable[StepPart]) -> IndexerLoss | None:
    """The part of a step that has the indexers' losses; None: they have none."""
    for part in parts:
        if isinstance(part, IndexerLoss):
            return part
    return None


def scale_of_backward() -> float | Tensor:
    """By which Megatron multiplies the gradients of these losses now."""
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        DSAIndexerLossAutoScaler as Scaler,
    )

    scale = Scaler.main_loss_backward_scale
    return 1.0 if scale is None else scale


def attention_target(
    query: Tensor, key: Tensor, is_visible: Tensor, scale: float, group: Any
) -> Tensor:
    """Probabilities of attention, averaged over the heads of all ranks, [queries, keys].

    Args:
        query: [queries, heads, dim].
        key: [keys, heads, dim].
        is_visible: keys of which the loss is, bool [queries, keys].
        group: tensor-parallel ranks, which have other heads each.
    """
    wide = wider(query.dtype)
    scores = torch.einsum("shd,thd->hst", query.to(wide), key.to(wide)) * scale
    total = torch.softmax(scores.masked_fill(~is_visible, float("-inf")), dim=-1).sum(0)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total / total.sum(-1, keepdim=True)


def divergences(target: Tensor, scores: Tensor, is_visible: Tensor) -> Tensor:
    """Of the indexer's probabilities from a target, [queries].

    Args:
        target: see `attention_target`.
        scores: of the indexer, [queries, keys].
    """
    hidden = ~is_visible
    scores = scores.masked_fill(hidden, float("-inf"))
    if is_since("0.19"):
        logarithms = torch.log_softmax(scores, dim=-1).masked_fill(hidden, 0)
        return (target * (target.clamp_min(_LEAST).log() - logarithms)).sum(-1)
    predicted = torch.softmax(scores, dim=-1)
    return (target * ((target + _LEAST).log() - (predicted + _LEAST).log())).sum(-1)
