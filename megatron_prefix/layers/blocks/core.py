"""Attention of a segment: its spans' causal blocks, a block a level of ancestors, one merge.
The keys of short ancestors are in the causal blocks, too (front.py).

One autograd function computes attention and uses the sidecar. Its forward copies the payload of an
inner segment into the sidecar: K/V, or that from which its descendants make them (shared.py). Its
backward sends each ancestor its part of gK/gV, and adds those from descendants to an inner
segment's own dK/dV. That is exact: under a causal mask a suffix reaches its prefix only through
gK/gV, and the prefix's backward is linear in them ("Schedule-Level Shared-Prefix Reuse for LLM RL
Training", section 3.1 and appendix A).

With context parallelism the sidecar gathers keys and scatters gradients. Each rank has two pieces
of every span (tree/cp_layout.py), each a run that sees its span up to its own end, so own attention
is one kernel call in any case.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_prefix.layers.blocks.front import FrontKeys, KeysInFront, front_keys
from megatron_prefix.layers.blocks.interface import Kernel, Partial, Runs
from megatron_prefix.layers.blocks.merge import merge, sink_gradient, with_sink
from megatron_prefix.layers.blocks.shared import KEYS, Shared
from megatron_prefix.layers.segment import SegmentContext
from megatron_prefix.sidecar.arena import KeyValue, OwnKeys, Rows
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
        sink: one more score of every head, [heads], without a value; None: no sink.
        into: memory for the output, which stays until the backward; None: new memory.

    Returns:
        [positions, 1, heads * value_dim], as Megatron's core attention returns it.
    """
    cast = _AS_IT_IS if shared.is_keys else autocast_now(query.device.type)
    saved = context.inner and shared.is_keys
    takes_fronts = shared.is_keys and kernel.takes_fronts
    front = front_keys(context, key.device) if takes_fronts else None
    in_front = front.levels if front else ()
    numbers = range(context.num_levels if shared.window is None else 0)
    levels = tuple(number for number in numbers if number not in in_front)
    call = _AttentionCall(context, layer, scale, kernel, shared, cast, into, saved, levels, front)
    # Where nothing is expanded here, weights have no gradient to get.
    weights = shared.weights if levels else ()
    out: Tensor = _SegmentAttention.apply(
        query.squeeze(1), key.squeeze(1), value.squeeze(1), sink, call, *weights
    )
    return out.flatten(1).unsqueeze(1)


@functools.lru_cache(maxsize=256)
def own_kernel_runs(lengths: tuple[int, ...], rank: int, size: int) -> Runs:
    """Runs of a rank's queries over their own segment, for spans of these (whole) lengths."""
    own = cp_layout.own_runs(lengths, rank, size)
    return Runs(own.queries, own.keys, causal=True)


class _AttentionCall(NamedTuple):
    """Arguments of `segment_attention` that are not differentiated.

    Attributes:
        saved: whether the sidecar has the segment's own K and V.
        levels: of ancestors, each of which is a call of the kernel.
        front: others, whose keys are in front of own ones.
    """

    context: SegmentContext
    layer: int
    scale: float
    kernel: Kernel
    shared: Shared
    autocast: contextlib.AbstractContextManager[Any]
    into: Tensor | None
    saved: bool
    levels: Sequence[int]
    front: FrontKeys | None

    def own(self, key_value: KeyValue) -> tuple[OwnKeys, Runs]:
        """Keys of the causal call, and its runs."""
        own, runs = self.shared.own(self.context, self.layer, key_value)
        if self.front is None:
            return own, runs
        return KeysInFront(own, self.front, self.context, self.layer), self.front.runs


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        call: _AttentionCall,
        *weights: Tensor,
    ) -> Tensor:
        context, layer, scale, kernel, shared, *_ = call
        cache, (own_keys, own_runs) = context.cache, call.own((key, value))
        if not call.saved:
            context.capture(layer, shared, key, value)
        context.enter(layer, backward=context.backward)
        own_kv = own_keys.runs() if context.joined else None  # first: its own suffixes read them
        above = []
        for number in call.levels:
            level = cache.level(context.index, number)
            key_value = shared.keys(cache.read(layer, context.index, level))
            runs = context.level_runs[number]
            part = kernel.forward(_selected(query, level.queries), *key_value, runs, scale)
            above.append(_scattered(part, level.queries, len(query)))
        parts = [kernel.forward(query, *(own_kv or own_keys.runs()), own_runs, scale), *above]
        out, lse = merge(parts)
        if sink is not None:
            out, lse = with_sink(out, lse, sink)
        if call.into is not None:
            out = call.into.view(out.shape).copy_(out)
        context.leave(layer, backward=False)
        ctx.call, ctx.aux, ctx.num_weights = call, [part.aux for part in parts], len(weights)
        ctx.save_for_backward(query, out, lse, sink, *(() if call.saved else (key, value)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _AttentionCall = ctx.call
        context, layer, scale, kernel, shared, autocast, *_ = call
        cache, (query, out, lse, sink, *saved) = context.cache, ctx.saved_tensors
        key, value = saved or cache.own(layer, context.index)
        own_keys, own_runs = call.own((key, value))
        context.enter(layer, backward=True)
        query_grad, *gradients = kernel.backward(
            out_grad, query, *own_keys.runs(), out, lse, ctx.aux[0], own_runs, scale
        )
        if not context.joined:  # as early as can be; they may be large, and are not kept here
            own_keys.send((gradients.pop(0), gradients.pop(0)))
        sums: list[Tensor | None] = [None] * ctx.num_weights
        for number, level_aux in zip(call.levels, ctx.aux[1:], strict=True):
            level = cache.level(context.index, number)
            payload, queries = cache.read(layer, context.index, level), level.queries
            with autocast:
                key_value, pull = shared.keys_with_pull(payload)
            level_grad, *seen_grads = kernel.backward(
                _selected(out_grad, queries), _selected(query, queries), *key_value,
                _selected(out, queries), _selected(lse, queries, 1), level_aux,
                context.level_runs[number], scale,
            )  # fmt: skip
            query_grad = _add_selected(query_grad, queries, level_grad)
            payload_grad, of_weights = pull((seen_grads[0], seen_grads[1]))
            sums = [*map(sum_of, sums, of_weights)]
            cache.add(layer, context.index, level, payload_grad)
        if context.joined:  # only now, with what its suffixes have sent
            own_keys.send((gradients.pop(0), gradients.pop(0)))
        key_grad, value_grad = own_keys.take()
        key_grad, value_grad = key_grad.to(key.dtype), value_grad.to(value.dtype)
        if context.inner and not call.saved:  # else what descendants have sent is in them
            sent_here = cache.take(layer, context.index)
            if sent_here is not None:
                shared.returned(context, sent_here, (key_grad, value_grad))
        context.leave(layer, backward=True)
        sink_grad = None if sink is None else sink_gradient(out_grad, out, lse, sink)
        return query_grad, key_grad, value_grad, sink_grad, None, *sums


def autocast_now(device_type: str) -> torch.autocast:
    """The autocast of now, for a backward, which runs outside of it."""
    dtype = torch.get_autocast_dtype(device_type)
    return torch.autocast(device_type, dtype, torch.is_autocast_enabled(device_type), False)


def sum_of(total: Tensor | None, addend: Tensor | None) -> Tensor | None:
    """Of two gradients, each of which may be None."""
    return total if addend is None else addend if total is None else total + addend


def _selected(x: Tensor, rows: Rows, dim: int = 0) -> Tensor:
    """Rows of `x`: a view if they are consecutive, else a copy."""
    if isinstance(rows, slice):
        return x.narrow(dim, rows.start, rows.stop - rows.start)
    return x.index_select(dim, rows)


def _scattered(part: Partial, rows: Rows, num_queries: int) -> Partial:
    if isinstance(rows, slice) and rows == slice(0, num_queries):
        return part
    out = part.out.new_zeros((num_queries, *part.out.shape[1:]))
    lse = part.lse.new_full((part.lse.shape[0], num_queries), float("-inf"))
    out[rows], lse[:, rows] = part.out, part.lse
    return Partial(out, lse, part.aux)


def _add_selected(total: Tensor, rows: Rows, part: Tensor) -> Tensor:
    if isinstance(rows, slice):
        total[rows].add_(part)
    else:
        total.index_add_(0, rows, part)
    return total
