"""Attention of a segment: its causal block, its ancestors' dense blocks, one merge.

One autograd function is both the attention and the tap.  On the way forward it copies an inner
segment's K/V into the sidecar; on the way back it sends each ancestor its share of gK/gV and adds
to an inner segment's own dK/dV what its descendants sent.  The algebra is "Schedule-Level
Shared-Prefix Reuse for LLM RL Training", section 3.1 and appendix A: under a causal mask the only
road from a suffix back to its prefix is gK/gV, and the prefix's backward is linear in them.

With context parallelism the sidecar gathers what is read and scatters what is sent, and the
segment's own attention spans ranks (megatron_prefix/attention/own.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_prefix.attention.kernels import Kernel
from megatron_prefix.attention.merge import merge
from megatron_prefix.attention.own import own_rows
from megatron_prefix.sidecar.cache import SidecarCache
from megatron_prefix.tree.kv_layout import Block

if TYPE_CHECKING:
    from megatron_prefix.moe.ledger import RouterLedger
    from megatron_prefix.offload.segment import OffloadedSegment


@dataclass(frozen=True)
class SegmentContext:
    """What attention and routers have to know of the segment that runs.

    Attributes:
        index: the segment.
        inner: whether other segments read its K/V.
        lengths: rows of each rollout on this rank, padding included.
        blocks: its dense blocks.
        positions: true position of every row, int64 [padded_length], on the model's device.
        cache: the sidecar of this model chunk.
        ledger: accounts for its routers' losses; None without routers and without gradients.
        backward: whether its backward runs: a forward inside it is recomputation, and goes from
            the last layer to the first.
        offload: takes what its forward saves; None where that stays.
        ahead: saved tensors on the host that the backwards after the one that runs, whichever it
            is, want back; the executor changes it.
    """

    index: int
    inner: bool
    lengths: tuple[int, ...]
    blocks: tuple[Block, ...]
    positions: Tensor
    cache: SidecarCache
    ledger: RouterLedger | None = None
    backward: bool = False
    offload: OffloadedSegment | None = None
    ahead: Sequence[OffloadedSegment] = ()


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: SegmentContext,
    layer: int,
    scale: float,
    kernel: Kernel,
) -> Tensor:
    """Attention of one segment in one layer.

    Args:
        query: [rows, 1, heads, dim].
        key: [rows, 1, kv_heads, dim].
        value: [rows, 1, kv_heads, value_dim].
        context: the segment.
        layer: local index of the attention layer.
        scale: softmax scale.
        kernel: runs each block.

    Returns:
        [rows, 1, heads * value_dim], as Megatron's core attention returns it.
    """
    out = _SegmentAttention.apply(
        query.squeeze(1), key.squeeze(1), value.squeeze(1), context, layer, scale, kernel
    )
    return out.flatten(1).unsqueeze(1)


def _pieces(context: SegmentContext) -> list[tuple[Block, slice]]:
    """What a segment's queries see without a mask, kernel call by kernel call."""
    return [(block, rows) for block in context.blocks for rows in context.cache.pieces(block)]


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: SegmentContext,
        layer: int,
        scale: float,
        kernel: Kernel,
    ) -> Tensor:
        cache = context.cache
        if context.inner:
            cache.capture(layer, context.index, key, value)
            key, value = cache.own(layer, context.index)
        own = own_rows(cache, kernel, query, key, value, scale, context.lengths)
        cache.prefetch(layer, context.index, backward=context.backward)
        after = layer - 1 if context.backward else layer + 1
        cache.prefetch(after, context.index, backward=context.backward)
        dense = []
        for block, rows in _pieces(context):
            seen, values = cache.read(layer, block)
            dense.append(kernel.dense(query, seen[rows], values[rows], scale))
        parts = [*own.forward(), *dense]
        out, lse = merge(parts)
        if not context.backward:  # else this is recomputation, and the layer's backward is next
            cache.release(layer)
        ctx.call = (context, layer, scale, kernel, [part.aux for part in parts])
        # An inner segment's K/V live in the sidecar: saving them here would hold them twice.
        ctx.save_for_backward(query, out, lse, *(() if context.inner else (key, value)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        context, layer, scale, kernel, aux = ctx.call
        query, out, lse, *saved = ctx.saved_tensors
        cache: SidecarCache = context.cache
        key, value = cache.own(layer, context.index) if context.inner else saved
        own = own_rows(cache, kernel, query, key, value, scale, context.lengths)
        cache.prefetch(layer, context.index, backward=True)
        cache.prefetch(layer - 1, context.index, backward=True)
        pieces = _pieces(context)
        num_own = len(aux) - len(pieces)
        query_grad = own.backward(out_grad, out, lse, aux[:num_own])
        for (block, rows), piece_aux in zip(pieces, aux[num_own:], strict=True):
            seen, values = cache.read(layer, block)
            more, seen_grad, values_grad = kernel.dense_backward(
                out_grad, query, seen[rows], values[rows], out, lse, piece_aux, scale
            )
            query_grad = query_grad.add_(more)
            cache.add_gradient(layer, block, seen_grad, values_grad, rows.start)
        key_grad, value_grad = own.gradients()
        if context.inner and (sent := cache.take_gradient(layer, context.index)):
            key_grad, value_grad = sent[0] + key_grad, sent[1] + value_grad
        cache.release(layer)
        for waiting in context.ahead:
            waiting.prefetch(early=True)
        return query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype), *(None,) * 4
