"""Attention of a segment: its spans' causal blocks, a block a level of ancestors, one merge.

One autograd function computes attention and uses the sidecar. Its forward copies into the sidecar
what an inner segment leaves: K/V, or that from which its descendants make them (shared.py). Its
backward sends each ancestor its part of gK/gV, and adds what descendants sent to an inner segment's
own dK/dV. That is exact: under a causal mask a suffix reaches its prefix
only through gK/gV, and the prefix's backward is linear in them ("Schedule-Level Shared-Prefix Reuse
for LLM RL Training", section 3.1 and appendix A).

With context parallelism the sidecar gathers what is read and scatters what is sent. Each rank has
two pieces of every span (megatron_prefix/tree/cp_layout.py). A piece is a run that sees its span up
to its own end, so a rank attends to its segment's own keys in one call of the kernel in any case.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_prefix.layers.blocks.interface import Kernel, Partial, Runs
from megatron_prefix.layers.blocks.merge import merge, sink_gradient, with_sink
from megatron_prefix.layers.blocks.shared import KEYS, Shared
from megatron_prefix.layers.segment import SegmentContext
from megatron_prefix.sidecar.arena import Rows
from megatron_prefix.tree import cp_layout

_AS_IT_IS = contextlib.nullcontext()


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: SegmentContext,
    layer: int,
    scale: float,
    kernel: Kernel,
    shared: Shared = KEYS,
    sink: Tensor | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """Attention of one segment in one layer.

    Args:
        query: [positions, 1, heads, dim].
        key: [positions, 1, kv_heads, dim].
        value: [positions, 1, kv_heads, value_dim].
        context: the segment.
        layer: local index of the attention layer.
        scale: softmax scale.
        kernel: runs each block.
        shared: what the layer leaves for children.
        sink: one more score of every head, [heads], without a value; None: there is none.
        into: where its output is to be, and to stay until its backward; None: anywhere.

    Returns:
        [positions, 1, heads * value_dim], as Megatron's core attention returns it.
    """
    cast = _AS_IT_IS if shared.is_keys else autocast_now(query.device.type)
    kept = context.inner and shared.is_keys
    num_levels = context.num_levels if shared.window is None else 0
    call = _Call(context, layer, scale, kernel, shared, cast, into, kept, num_levels)
    # Where nothing is expanded here, weights have no gradient to get.
    weights = shared.weights if num_levels else ()
    out: Tensor = _SegmentAttention.apply(
        query.squeeze(1), key.squeeze(1), value.squeeze(1), sink, call, *weights
    )
    return out.flatten(1).unsqueeze(1)


@functools.lru_cache(maxsize=256)
def own_runs(lengths: tuple[int, ...], rank: int, size: int) -> Runs:
    """What a rank's queries see of their own segment, for spans of these (whole) lengths."""
    own = cp_layout.own_runs(lengths, rank, size)
    return Runs(own.queries, own.keys, causal=True)


class _Call(NamedTuple):
    """What `segment_attention` was called with, but for tensors.

    Attributes:
        kept: whether the sidecar has its K and V.
        num_levels: calls in which its queries see keys that are not among its own.
    """

    context: SegmentContext
    layer: int
    scale: float
    kernel: Kernel
    shared: Shared
    autocast: contextlib.AbstractContextManager[Any]
    into: Tensor | None
    kept: bool
    num_levels: int


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        call: _Call,
        *weights: Tensor,
    ) -> Tensor:
        context, layer, scale, kernel, shared, *_ = call
        cache, (keys, own) = context.cache, shared.own(context, layer, (key, value))
        if not call.kept:
            context.capture(layer, shared, key, value)
        context.enter(layer, backward=context.backward)
        mine = keys.runs() if context.joined else None  # first: its own suffixes read them
        above = []
        for number in range(call.num_levels):
            level = cache.level(context.index, number)
            seen = shared.keys(cache.read(layer, context.index, level))
            runs = context.level_runs[number]
            part = kernel.forward(_selected(query, level.queries), *seen, runs, scale)
            above.append(_spread(part, level.queries, len(query)))
        parts = [kernel.forward(query, *(mine or keys.runs()), own, scale), *above]
        out, lse = merge(parts)
        if sink is not None:
            out, lse = with_sink(out, lse, sink)
        if call.into is not None:
            out = call.into.view(out.shape).copy_(out)
        context.leave(layer, backward=False)
        ctx.call, ctx.aux, ctx.num_weights = call, [part.aux for part in parts], len(weights)
        ctx.save_for_backward(query, out, lse, sink, *(() if call.kept else (key, value)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        context, layer, scale, kernel, shared, autocast, *_ = call
        cache, (query, out, lse, sink, *saved) = context.cache, ctx.saved_tensors
        key, value = saved or cache.own(layer, context.index)
        keys, own = shared.own(context, layer, (key, value))
        context.enter(layer, backward=True)
        query_grad, *gradients = kernel.backward(
            out_grad, query, *keys.runs(), out, lse, ctx.aux[0], own, scale
        )
        if not context.joined:  # as early as can be; they may be large, and are not kept here
            keys.send((gradients.pop(0), gradients.pop(0)))
        sums: list[Tensor | None] = [None] * ctx.num_weights
        for number, level_aux in enumerate(ctx.aux[1:]):
            level = cache.level(context.index, number)
            payload, mine = cache.read(layer, context.index, level), level.queries
            with autocast:
                seen, pull = shared.keys_with_pull(payload)
            more, *seen_grads = kernel.backward(
                _selected(out_grad, mine), _selected(query, mine), *seen,
                _selected(out, mine), _selected(lse, mine, 1), level_aux,
                context.level_runs[number], scale,
            )  # fmt: skip
            query_grad = _add_selected(query_grad, mine, more)
            sent, of_weights = pull((seen_grads[0], seen_grads[1]))
            sums = [*map(sum_of, sums, of_weights)]
            cache.add(layer, context.index, level, sent)
        if context.joined:  # only now, with what its suffixes have sent
            keys.send((gradients.pop(0), gradients.pop(0)))
        key_grad, value_grad = keys.take()
        key_grad, value_grad = key_grad.to(key.dtype), value_grad.to(value.dtype)
        if context.inner and not call.kept:  # else what descendants have sent is in them
            sent_here = cache.take(layer, context.index)
            if sent_here is not None:
                shared.returned(context, sent_here, (key_grad, value_grad))
        context.leave(layer, backward=True)
        sink_grad = None if sink is None else sink_gradient(out_grad, out, lse, sink)
        return query_grad, key_grad, value_grad, sink_grad, None, *sums


def autocast_now(device_type: str) -> torch.autocast:
    """What is cast now: a backward runs outside of it."""
    dtype = torch.get_autocast_dtype(device_type)
    return torch.autocast(device_type, dtype, torch.is_autocast_enabled(device_type), False)


def sum_of(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Of two gradients, of which each may be none."""
    return total if more is None else more if total is None else total + more


def _selected(x: Tensor, mine: Rows, dim: int = 0) -> Tensor:
    """Some queries: a view of consecutive ones, else a copy."""
    if isinstance(mine, slice):
        return x.narrow(dim, mine.start, mine.stop - mine.start)
    return x.index_select(dim, mine)


def _spread(part: Partial, mine: Rows, num_queries: int) -> Partial:
    """A result for some queries as one for all; the other queries see no key."""
    if isinstance(mine, slice) and mine == slice(0, num_queries):
        return part
    out = part.out.new_zeros((num_queries, *part.out.shape[1:]))
    lse = part.lse.new_full((part.lse.shape[0], num_queries), float("-inf"))
    out[mine], lse[:, mine] = part.out, part.lse
    return Partial(out, lse, part.aux)


def _add_selected(total: Tensor, mine: Rows, part: Tensor) -> Tensor:
    """Adds the gradient of some queries to that of all, in place."""
    if isinstance(mine, slice):
        total[mine].add_(part)
    else:
        total.index_add_(0, mine, part)
    return total
