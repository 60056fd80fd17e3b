"""Exact attention and its backward from the textbook formulas: slow, any device, any float dtype.

The reference for every other kernel. It computes in fp64 for fp64 inputs, else in fp32, and rounds
once at the end. The backward recomputes softmax weights from the log-sum-exp ("FlashAttention: Fast
and Memory-Efficient Exact Attention with IO-Awareness", appendix B.2), so it also works from a
*merged* log-sum-exp:

    S = scale * Q K^T            O = softmax(S) V          P = exp(S - lse)
    D = rowsum(dO * O)           dS = P * (dO V^T - D)
    dQ = scale * dS K            dK = scale * dS^T Q       dV = P^T dO

O is not P V: lse is rounded, by up to eps |lse|, and a row of P is off by as much. In D it would
count in full where one key has nearly all of the weight and dO V^T - D cancels.

Shapes: q [n, s, h, d], k [n, t, h_kv, d], v [n, t, h_kv, dv], lse [n, h, s], out [n, s, h, dv], for
n independent spans with the same mask. The query heads of one K/V head are stacked in one matrix
product, so K/V are not repeated and dK/dV are summed over the group.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_prefix.device.tolerance import accumulator_dtype

MAX_SCORES = 1 << 23
"""Scores held at once (64 MB in fp64); longer spans are computed in pieces."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of all queries: (out in q's dtype, lse in the accumulator's dtype).

    ``causal``: of t keys query i of s sees the first t - s + i + 1 (with a ``window`` the last
    window + 1 of these), else every one. Without keys out is 0 and lse is -inf.
    """
    num, length, heads, _ = q.shape
    wide = accumulator_dtype(q.dtype)
    keys, values = k.transpose(1, 2).to(wide), v.transpose(1, 2).to(wide)
    out = q.new_empty(num, length, heads, v.shape[-1])
    lse = torch.empty(num, heads, length, dtype=wide, device=q.device)
    for start, stop, num_visible in _query_pieces(q, k, causal):
        scores = _scores(q[:, start:stop], keys[:, :, :num_visible], scale, causal, window)
        weighted = torch.softmax(scores, -1) @ values[:, :, :num_visible]
        out[:, start:stop] = _ungroup(weighted, stop - start)
        lse[:, :, start:stop] = torch.logsumexp(scores, -1).reshape(num, heads, stop - start)
    return out, lse


def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's part of (dq, dk, dv) from the merged ``out`` and ``lse``, in q's dtype."""
    wide, kv_heads = accumulator_dtype(q.dtype), k.shape[2]
    keys, values = k.transpose(1, 2).to(wide), v.transpose(1, 2).to(wide)
    dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for start, stop, num_visible in _query_pieces(q, k, causal):
        part = slice(start, stop)
        scores = _scores(q[:, part], keys[:, :, :num_visible], scale, causal, window)
        p = torch.exp_(scores.sub_(lse[:, :, part].to(wide).reshape(*scores.shape[:3], 1)))
        do = _group(dout[:, part], kv_heads).to(wide)
        d = (do * _group(out[:, part], kv_heads).to(wide)).sum(-1, keepdim=True)
        dvalues[:, :, :num_visible] += p.transpose(2, 3) @ do
        ds = (do @ values[:, :, :num_visible].transpose(2, 3)).sub_(d).mul_(p).mul_(scale)
        dkeys[:, :, :num_visible] += ds.transpose(2, 3) @ _group(q[:, part], kv_heads).to(wide)
        dq[:, part] = _ungroup(ds @ keys[:, :, :num_visible], stop - start)
    return dq, _to_positions_first(dkeys, k.dtype), _to_positions_first(dvalues, v.dtype)


def _query_pieces(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[int, int, int]]:
    """(first query, one past the last, number of keys that they can see), in order."""
    num, length, heads, _ = q.shape
    num_keys = k.shape[1]
    step = max(1, MAX_SCORES // max(1, num * heads * num_keys))
    for start in range(0, length, step):
        stop = min(length, start + step)
        yield start, stop, num_keys - length + stop if causal else num_keys


def _scores(q: Tensor, keys: Tensor, scale: float, causal: bool, window: int | None) -> Tensor:
    """Scaled scores [n, h_kv, group * queries, keys]; of ``causal`` ones the last query sees the
    last key."""
    scores = (_group(q, keys.shape[1]).to(keys.dtype) @ keys.transpose(2, 3)).mul_(scale)
    if causal:
        queries = torch.arange(keys.shape[2] - q.shape[1], keys.shape[2], device=q.device)
        keys_at = torch.arange(keys.shape[2], device=q.device)
        hidden = keys_at > queries[:, None]
        if window is not None:
            hidden |= keys_at < queries[:, None] - window
        scores.unflatten(2, (-1, q.shape[1])).masked_fill_(hidden, float("-inf"))
    return scores


def _group(x: Tensor, kv_heads: int) -> Tensor:
    """[n, s, h, d] -> [n, h_kv, group * s, d]: head h reads K/V head h // group."""
    return x.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _ungroup(x: Tensor, length: int) -> Tensor:
    return x.unflatten(2, (-1, length)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _to_positions_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, h, s, d] -> contiguous [n, s, h, d] in ``dtype``."""
    return x.transpose(1, 2).to(dtype).contiguous()
