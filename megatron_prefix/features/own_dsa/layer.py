"""A trainer's own sparse attention in a segment (kind.py): its forward, with other kernels.

The module runs as it is, on a segment as one sequence whose rotary table has each token's own
position. Two names of its forward stand for something else then. The indexer is asked span by span,
with the keys of all ancestors in front of the span's own, as they lie in a rollout. What it chooses
becomes rows of one pool, [ancestors' rows, the segment's], from which the stock kernel reads those
of all spans in one call: queries need no order of keys, so nothing is merged.

Context-parallel ranks gather rows and index keys inside the module, and add up their gradients
there: each leaves all rows of a segment to its children, which send back their own queries' part.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_prefix.device.transfer import to_device
from megatron_prefix.features.own_dsa.kind import WHOLE
from megatron_prefix.features.own_dsa.replay import choices_of
from megatron_prefix.layers.blocks.shared import Shared
from megatron_prefix.layers.rebound import rebound
from megatron_prefix.sidecar.arena import Payload, TailReading, wider
from megatron_prefix.tree import cp_layout

if TYPE_CHECKING:
    from megatron_prefix.layers.kind import Override, Running
    from megatron_prefix.layers.segment import SegmentContext

_PACKING, _INDEX_KEYS = "sequence of a sparse layer", "index keys"
_HOLDER = "_HOLDER_ATTR"
"""Where a class names the attribute of a packing that has the choice of earlier layers."""


class _Run(NamedTuple):
    """Queries [first, stop) of a segment on this rank, and what they see.

    Attributes:
        rows: of the pool, in the order of positions, int64; the last is the last query's own.
    """

    first: int
    stop: int
    rows: Tensor


class _View(NamedTuple):
    """What a segment's queries see, and how the module has its rows.

    Attributes:
        reading: ancestors' rows; None: none.
        runs: of this rank's queries.
        order: of the segment's positions in the module's rows, int64; None: as they are.
        places: the reverse.
        positions: in rollouts, of the module's rows, int64.
    """

    reading: TailReading | None
    runs: Sequence[_Run]
    order: Tensor | None
    places: Tensor | None
    positions: Tensor


class OwnSparse(Shared):
    """One of them.

    Args:
        module: the self-attention of a layer.
        number: of the layer in the sidecar.
        running: says which segment runs.
    """

    def __init__(self, module: Any, number: int, running: Running) -> None:
        self.module, self.number, self._running = module, number, running
        self._stock, self._rotary = module.forward, module.rotary_pos_emb
        running.rotary.add(self._rotary)
        names = module.forward.__func__.__globals__
        self.kernel = names["SparseMLA"]
        self._within = rebound(
            module.forward,
            lighting_indexer=functools.partial(self._chosen, names["lighting_indexer"]),
            SparseMLA=_Applied(self._attended),
            generate_varlen_mask_params=lambda ends: (ends, ends),  # nothing reads them
            scatter_to_sequence_parallel_region=lambda x, **_: x,
        )
        self._begin = 0

    def overrides(self) -> list[Override]:
        """Methods of instances, and what takes their place."""
        return [
            (self.module, "forward", self._forward),
            (self._rotary, "forward", self._angles(self._rotary.forward)),
        ]

    def left(self, context: SegmentContext, key: Tensor, value: Tensor | None) -> Payload:
        """Rows [positions, 1, width], and index keys [positions, width] of layers that choose."""
        order = self.view(context).order
        every = (key,) if value is None else (key, value)
        return every if order is None else tuple(part.index_select(0, order) for part in every)

    def view(self, context: SegmentContext) -> _View:
        """Made once a step."""
        make = functools.partial(_view_of, context)
        return context.cache.once(context.index, _View, make)

    def read(self, context: SegmentContext) -> Payload:
        """What ancestors have left, in one tensor each; nothing without any."""
        reading = self.view(context).reading
        return () if reading is None else context.cache.read(self.number, context.index, reading)

    def _forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        context = self._running.current
        if context is None:
            return self._stock(hidden_states, *args, **kwargs)
        self._begin = 0
        packing = self._packing(context)
        return self._within(hidden_states, *args, **{**kwargs, "packed_seq_params": packing})

    def _packing(self, context: SegmentContext) -> PackedSeqParams:
        """A segment as a pack of one sequence. With it goes what earlier layers have chosen, also
        to Megatron's recomputation in the backward."""
        packing: PackedSeqParams | None = context.between.get((_PACKING, None))
        if packing is None:
            num = len(self.view(context).positions)

            def make() -> PackedSeqParams:
                ends = torch.tensor([0, num], dtype=torch.int32).to(context.positions.device)
                return PackedSeqParams(
                    qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=num,
                    max_seqlen_kv=num,
                )  # fmt: skip

            # Megatron does not recompute what does not train.
            is_kept = self.module.config.recompute_granularity == "full" and self.module.training
            packing = context.cache.once(context.index, _PACKING, make) if is_kept else make()
            context.between[_PACKING, None] = packing
        return packing

    def _angles(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            context = self._running.current
            if context is None:
                return stock(*args, **kwargs)
            angles, scale = self._running.rotary.of(self._rotary, self.view(context).positions)
            if len(angles) == 1:  # the modules drop a dimension of size 1
                angles = angles.expand(2, *angles.shape[1:])
            return (angles, scale) if self.module.config.rope_type == "yarn" else angles

        return forward

    @torch.no_grad()
    def _chosen(
        self,
        stock: Callable[..., tuple[Tensor, Tensor]],
        query: Tensor,
        key: Tensor,
        weight: Tensor,
        starts: Tensor,
        ends: Tensor,
        topk: int,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Instead of the indexer: rows of the pool, int32 [queries, topk], -1 for none, and scores
        that nothing reads.

        Args:
            stock: the indexer.
            query: [queries, heads, width], of the module's queries some behind those before.
            key: [positions, width] of all of them.
            weight: of the heads, [queries, heads, 1].
            starts, ends: not those that `stock` wants.
        """
        context = self._running.current
        if context is None:
            return stock(query, key, weight, starts, ends, topk, **options)
        begin, self._begin = self._begin, self._begin + len(query)
        context.between[_INDEX_KEYS, self.number] = key
        chosen = query.new_full((len(query), topk), -1, dtype=torch.int32)
        pool = torch.cat([*self.read(context)[1:], key])
        runs = () if self.number == context.keys_only else self.view(context).runs
        told = choices_of(context.parts, self.module, context.index) if runs else None
        for run in runs:
            first, stop = max(run.first, begin), min(run.stop, self._begin)
            if first >= stop:
                continue
            rows = run.rows[: len(run.rows) - (run.stop - stop)]
            local, num = slice(first - begin, stop - begin), len(rows)
            if told is not None:
                chosen[local] = _rows_of(told[first:stop], rows)
                continue
            keys = pool.index_select(0, rows)
            if num < topk:  # there must be as many, though not to see
                keys = torch.cat([keys, keys.new_zeros((topk - num, *keys.shape[1:]))])
            last = torch.arange(num - (stop - first), num, device=keys.device, dtype=torch.int32)
            _, best = stock(
                query[local], keys, weight[local], torch.zeros_like(last), last + 1, topk, **options
            )
            chosen[local] = _rows_of(best, rows)
        return query.new_zeros((len(query), 1)), chosen

    def _attended(
        self, query: Tensor, rows: Tensor, chosen: Tensor, scale: float
    ) -> tuple[Tensor, None]:
        """Instead of the kernel, [queries, heads, rank].

        Args:
            query: [queries, heads, width].
            rows: [positions, 1, width] of all of them.
            chosen: [queries, 1, topk], of the pool.
        """
        context = self._running.current
        if context is None:
            raise RuntimeError("a segment ended inside a sparse layer")
        packing = context.between[_PACKING, None]
        index_keys = context.between.pop((_INDEX_KEYS, self.number), None)
        call = _Call(self, context, packing, index_keys, scale)
        return _PoolAttention.apply(query, rows, chosen, call), None

    def forget(self, packing: PackedSeqParams) -> None:
        """In the backward of a layer that has chosen: those behind it are through."""
        held = getattr(packing, getattr(self.module, _HOLDER, ""), None)
        if held is not None and not self.module.skip_topk:
            held.pop(self.module.layer_number, None)


class _Applied(NamedTuple):
    """Instead of an autograd function: `apply`."""

    apply: Callable[..., Any]


class _Call(NamedTuple):
    """What a kernel was called with, but for tensors with gradients."""

    layer: OwnSparse
    context: SegmentContext
    packing: PackedSeqParams
    index_keys: Tensor | None
    scale: float

    @property
    def needs_rows_only(self) -> bool:
        return self.layer.number == self.context.keys_only


class _Kept:
    """What an autograd function has as its `ctx`, without autograd."""

    saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


class _PoolAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, rows: Tensor, chosen: Tensor, call: _Call
    ) -> Tensor:
        layer, context = call.layer, call.context
        context.capture(layer.number, layer, rows, call.index_keys)  # type: ignore[arg-type]
        ctx.call, ctx.shapes = call, (query.shape, rows.shape)
        if call.needs_rows_only:
            context.leave(layer.number, backward=False)
            return query.new_zeros(()).expand(*query.shape[:2], layer.module.config.kv_lora_rank)
        context.enter(layer.number, backward=context.backward)
        pool, kept = torch.cat([*layer.read(context)[:1], rows]), _Kept()
        out: Tensor
        out, _ = layer.kernel.forward(kept, query, pool, chosen, call.scale)
        context.leave(layer.number, backward=False)
        # All but the pool, which is put together again.
        own = [None if tensor is pool else tensor for tensor in kept.saved_tensors]
        ctx.kept, kept.saved_tensors = kept, ()
        ctx.is_pool = [tensor is None for tensor in own]
        ctx.save_for_backward(rows, *(tensor for tensor in own if tensor is not None))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        layer, context, number = call.layer, call.context, call.layer.number
        context.enter(number, backward=True)
        query_shape, rows_shape = ctx.shapes
        if call.needs_rows_only:
            query_grad, own = out_grad.new_zeros(query_shape), out_grad.new_zeros(rows_shape)
        else:
            read, (rows, *saved) = layer.read(context), ctx.saved_tensors
            pool, tensors = torch.cat([*read[:1], rows]), iter(saved)
            ctx.kept.saved_tensors = [pool if is_pool else next(tensors) for is_pool in ctx.is_pool]
            query_grad, pool_grad, *_ = layer.kernel.backward(ctx.kept, out_grad, None)
            ctx.kept.saved_tensors = ()
            above, own = pool_grad.split([len(pool) - len(rows), len(rows)])
            if (reading := layer.view(context).reading) is not None:
                zeros = [torch.zeros_like(part) for part in read[1:]]
                context.cache.add(number, context.index, reading, (above, *zeros))
        sent = context.cache.take(number, context.index) if context.inner else None
        if sent is not None:
            places = layer.view(context).places
            returned = sent[0] if places is None else sent[0].index_select(0, places)
            own = (own.to(wider(own.dtype)) + returned).to(own.dtype)
        context.leave(number, backward=True)
        layer.forget(call.packing)
        return query_grad, own, None, None


def _rows_of(best: Tensor, rows: Tensor) -> Tensor:
    """Rows of the pool by places in a rollout, int32 [queries, topk], -1 for none. A query without
    any, whose output nobody reads, sees the first ones, as in miles."""
    first = torch.arange(best.shape[1], device=best.device) % len(rows)
    best = torch.where((best < 0).all(1, keepdim=True), first.to(best.dtype), best)
    places = rows.index_select(0, best.clamp(min=0).flatten().long()).view_as(best)
    return places.masked_fill(best < 0, -1).to(torch.int32)


def _view_of(context: SegmentContext) -> _View:
    cache, device = context.cache, context.positions.device
    reading, own = cache.tail(context.index, WHOLE), cache.map.lengths[context.index]
    rank, size = (cache.exchange.rank, cache.exchange.size) if cache.exchange else (0, 1)
    spans = ((),) * len(own) if reading is None else reading.spans
    num_read = max((stop for span in spans for _, stop in span), default=0)
    places = cp_layout.view_order(own, size) + num_read
    rows, bounds, num = [], [], 0
    for above, begin, length in zip(spans, itertools.accumulate(own, initial=0), own, strict=False):
        ancestors = np.concatenate([np.arange(0), *(np.arange(*interval) for interval in above)])
        for start, stop in cp_layout.pieces(length, rank, size):
            rows.append(np.concatenate([ancestors, places[begin : begin + stop]]))
            bounds.append((num, num + stop - start))
            num += stop - start
    parts = to_device(device, np.concatenate(rows)).split([*map(len, rows)])
    runs = [_Run(*interval, part) for interval, part in zip(bounds, parts, strict=True)]
    if cache.exchange is None:
        return _View(reading, runs, None, None, context.positions)
    (positions,) = cache.exchange.gather(context.positions).wait()
    order = to_device(device, cp_layout.view_order(own, size))
    return _View(
        reading, runs, order, to_device(device, cp_layout.view_positions(own, size)), positions
    )
