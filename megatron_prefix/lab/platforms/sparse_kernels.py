"""Kernels of trainers' own sparse attention in plain torch, with their names and signatures.

slime and miles bring theirs for CUDA (slime_plugins/models/glm5/ops, apex); these are definitions,
for references and tests, on any device and in any dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROTATED = 8
"""Numbers of a row behind its latent, which theirs have fixed as well (64)."""


def indexer_scores(
    index_q: Tensor, index_k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor
) -> Tensor:
    """Scores of keys [keys, width], [queries, keys], of which every query sees those in [start,
    end); of queries [queries, heads, width] with weights [queries, heads]."""
    scores = torch.einsum("qhd,kd->qhk", index_q, index_k).relu()
    places = torch.arange(len(index_k), device=index_k.device)
    hidden = (places < starts[:, None]) | (places >= ends[:, None])
    return torch.einsum("qhk,qh->qk", scores, weights).masked_fill(hidden, float("-inf"))


def lighting_indexer(
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    topk: int,
    topk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores of the best keys, and which they are, int32 [queries, topk]; -1: none."""
    scores = indexer_scores(index_q, index_k, weights.squeeze(-1), starts, ends)
    best, chosen = scores.topk(topk)
    return best, chosen.to(torch.int32).masked_fill(best == float("-inf"), -1)


def generate_varlen_mask_params(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The first key that every query of a pack may see, and the one behind its last."""
    places = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
    samples = torch.searchsorted(cu_seqlens, places, right=True) - 1
    return cu_seqlens[samples], places + 1


class SparseMLA(torch.autograd.Function):
    """Attention to rows [keys, 1, width] by indices [queries, 1, topk], and its lse."""

    @staticmethod
    def run(q: Tensor, kv: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """[queries, heads, width without `ROTATED`] and [queries, heads]."""
        is_chosen = indices.squeeze(1) >= 0
        rows = kv.squeeze(1)[indices.squeeze(1).clamp(min=0).long()]
        scores = torch.einsum("qhd,qkd->qhk", q, rows) * scale
        scores = scores.masked_fill(~is_chosen[:, None], float("-inf"))
        out = torch.einsum("qhk,qkd->qhd", scores.softmax(-1), rows[..., :-ROTATED])
        return out, scores.logsumexp(-1)

    @staticmethod
    def gradients(
        q: Tensor, kv: Tensor, indices: Tensor, scale: float, grad_output: Tensor
    ) -> tuple[Tensor, ...]:
        """Of queries and rows."""
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, kv)]
            out, _ = SparseMLA.run(leaves[0], leaves[1], indices, scale)
        return torch.autograd.grad(out, leaves, grad_output)

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, kv: Tensor, indices: Tensor, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """See `run`."""
        ctx.scaling = scaling
        q, kv, indices = (x.contiguous() for x in (q, kv, indices))
        out, lse = SparseMLA.run(q, kv, indices, scaling)
        ctx.save_for_backward(q, kv, indices, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Nothing is made of gradients of the lse, as in theirs."""
        q, kv, indices, _, _ = ctx.saved_tensors
        gradients = SparseMLA.gradients(q, kv, indices, ctx.scaling, grad_output)
        return *gradients, None, None


def fused_apply_rotary_pos_emb_thd(x: Tensor, cu_seqlens: Tensor, angles: Tensor) -> Tensor:
    """As apex's, of a pack [positions, heads, width], by angles [positions, 1, 1, width]."""
    if angles.dim() != 4:
        raise ValueError(f"angles of {angles.dim()} dimensions: give four")
    places = torch.cat([torch.arange(int(num)) for num in cu_seqlens.diff()]).to(x.device)
    turns = angles[places].squeeze(1).to(x.dtype)
    first, second = x.chunk(2, -1)
    return x * turns.cos() + torch.cat([-second, first], -1) * turns.sin()
