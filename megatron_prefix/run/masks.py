"""Masks of model calls: which of them change nothing, and which segments cannot follow.

A span is computed without its siblings and without padding, so its attention is causal and nothing
else.  A mask is taken where stock attention is, too: where the mask is the causal one, or where
transformer-engine's attention is causal by itself and ignores it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_prefix.errors import refused
from megatron_prefix.layers.attention import MaskUse
from megatron_prefix.refusals.table import NO_MASK, NOT_CAUSAL, PADDING_MASK
from megatron_prefix.run.calls import ModelCall, shape_of


def check(
    calls: Sequence[ModelCall], use: MaskUse, *, counts_tokens: bool, sequence_ranks: int = 1
) -> None:
    """Refuses masks that segments cannot follow; the host waits only if there are masks.

    Args:
        calls: of one model chunk.
        use: what its attention does with an `attention_mask`.
        sequence_ranks: see `calls.layouts`.
        counts_tokens: whether its routers count tokens, those of a `padding_mask` left out.

    Raises:
        CannotShare: naming the mask, and the fix.
    """
    if use is MaskUse.NEEDED and any(call["attention_mask"] is None for call in calls):
        raise refused(NO_MASK)
    masked = [call for call in calls if call["attention_mask"] is not None]
    if _any([_changes_attention(call, use, sequence_ranks) for call in masked]):
        raise refused(NOT_CAUSAL)
    padded = [call["padding_mask"] for call in calls if call["padding_mask"] is not None]
    if counts_tokens and _any([(mask != 0).any() for mask in padded]):
        raise refused(PADDING_MASK)


def _changes_attention(call: ModelCall, use: MaskUse, sequence_ranks: int) -> Tensor:
    """Whether the attention of a call is not the causal one, or might not be; bool []."""
    mask, shape = call["attention_mask"], shape_of(call, sequence_ranks)
    if mask.dim() < 2:
        return _yes(mask)
    square = mask.shape[-1] == mask.shape[-2]
    if use is MaskUse.IGNORED and not square and shape is not None:
        kept = _kept(mask, shape)
        if kept is not None:  # no token that it keeps sees one that it leaves out, at the end
            return ~kept[:, 0].all() | (kept[:, 1:] & ~kept[:, :-1]).any()
    if mask.dtype != torch.bool or not square:
        return _yes(mask)
    causal = torch.ones_like(mask[(0,) * (mask.dim() - 2)]).triu(1)
    return (mask != causal).any()


def _kept(mask: Tensor, shape: torch.Size) -> Tensor | None:
    """Which tokens a mask of padding keeps, bool [samples, positions]; None for other masks.

    It has that shape itself, or that of transformer-engine's, [samples, 1, 1, positions], in which
    True is padding (SkyRL's).
    """
    if mask.shape == shape:
        return mask != 0
    rows, *middle = mask.shape[:-1]
    if mask.dtype == torch.bool and middle == [1, 1] and (rows, mask.shape[-1]) == shape:
        return ~mask[:, 0, 0]
    return None


def _yes(like: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.bool, device=like.device)


def _any(flags: list[Tensor]) -> bool:
    return bool(flags) and bool(torch.stack(flags).any())
