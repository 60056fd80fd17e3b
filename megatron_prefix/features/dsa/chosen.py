"""What an indexer's scores choose, and attention to it, of a span's queries: functions of tensors.

The arithmetic is that of `unfused_dsa_fn` in
megatron/core/transformer/experimental_attention_variant/dsa.py: scores of all pairs, and a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_prefix.sidecar.arena import wider


class Index(NamedTuple):
    """What the indexer makes of a segment's positions; with gradients if it has a loss.

    Attributes:
        query: [positions, heads, width].
        key: [positions, width].
        weight: of the heads, [positions, heads].
    """

    query: Tensor
    key: Tensor
    weight: Tensor


def index_scores(index: Index, has_relu: bool) -> Tensor:
    """Of keys by the indexer, summed over its heads, [queries, keys]."""
    wide = wider(index.query.dtype)
    scores = torch.einsum("shd,td->sht", index.query.to(wide), index.key.to(wide))
    return ((scores.relu() if has_relu else scores) * index.weight.unsqueeze(-1)).sum(1)


def choose(index: Index, topk: int, has_relu: bool = True) -> tuple[Tensor, Tensor]:
    """The keys of every query that it sees, int32 [queries, at most topk], and of which queries
    that was arbitrary, bool [queries]: the last one chosen has as high a score as one that was not.
    Where fewer keys are before a query, others behind it are among them, which `mask_of` hides.

    Args:
        index: of some queries, and of all keys up to the last query's own.
        topk: how many keys a query sees at most.
        has_relu: whether scores of a head below zero count as zero.
    """
    scores = index_scores(index, has_relu)
    hidden = ~causal(scores.shape[0], scores.shape[1], scores.device)
    scores.masked_fill_(hidden, float("-inf"))
    num = min(topk, scores.shape[1])
    highest, chosen = scores.topk(num, dim=-1)
    last = highest[:, -1:]
    tied = ((scores >= last).sum(-1) > num) & (last[:, 0] > float("-inf"))
    return chosen.to(torch.int32), tied


def causal(num: int, keys: int, device: torch.device) -> Tensor:
    """Which keys the last `num` positions of them see, bool [num, keys]."""
    places = torch.arange(keys, device=device)
    return places <= places[keys - num :, None]


def mask_of(chosen: Tensor, keys: int) -> Tensor:
    """The same of those that were chosen."""
    visible = causal(len(chosen), keys, chosen.device)
    return torch.zeros_like(visible).scatter_(1, chosen.long(), True) & visible


def attend(query: Tensor, key: Tensor, value: Tensor, is_visible: Tensor, scale: float) -> Tensor:
    """[queries, heads, value_dim], of queries [queries, heads, dim] and keys [keys, heads, dim]."""
    wide = wider(query.dtype)
    scores = torch.einsum("shd,thd->hst", query.to(wide), key.to(wide)) * scale
    weights = torch.softmax(scores.masked_fill(~is_visible, float("-inf")), dim=-1)
    return torch.einsum("hst,thd->shd", weights.to(value.dtype), value)


def gradients_of(
    inputs: Sequence[Tensor], out_grad: Tensor, is_visible: Tensor, scale: float
) -> Any:
    """Of queries, keys and values of one span."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        out = attend(leaves[0], leaves[1], leaves[2], is_visible, scale)
    return torch.autograd.grad(out, leaves, out_grad)
