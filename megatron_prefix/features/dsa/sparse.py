"""DeepSeek's sparse attention of segments: every query looks up its keys among all of its rollout.

What a query sees is decided by scores of all keys before it, so levels cannot be merged: in front
of the keys of a span lie all those of its ancestors, in the order of positions, and one call takes
them. Ancestors' keys and values are expanded from latents, as in features/mla/latent.py; index
keys are what they left. Some queries are computed at a time.

The indexer itself is the stock module, on the segment's positions. Its input is detached there, so
nothing flows through it but its own loss (loss.py).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_prefix.features.dsa.chosen import (
    Index,
    attend,
    causal,
    choose,
    gradients_of,
    index_scores,
    mask_of,
)
from megatron_prefix.features.dsa.loss import (
    IndexerLoss,
    attention_target,
    divergences,
    loss_of,
    scale_of_backward,
)
from megatron_prefix.features.dsa.visible import seen_of
from megatron_prefix.features.mla.latent import Latents
from megatron_prefix.layers.blocks.core import autocast_now, sum_of
from megatron_prefix.layers.blocks.shared import Pull
from megatron_prefix.layers.blocks.unread import keys_only
from megatron_prefix.sidecar.arena import KeyValue, Payload, wider
from megatron_prefix.sidecar.cache import SegmentState

if TYPE_CHECKING:
    from megatron_prefix.layers.kind import Override, Running
    from megatron_prefix.layers.segment import SegmentContext


logger = logging.getLogger(__name__)


class Sparse(Latents):
    """What one layer leaves: latents, rotated parts of keys, and index keys; see Shared.

    Args:
        module: Megatron's MLASelfAttention, whose core attention has an indexer.
        number: of the layer in the sidecar.
        running: says which segment runs.

    Attributes:
        has_warned: whether any layer has met a tie.
    """

    has_warned = False

    def __init__(self, module: Any, number: int, running: Running) -> None:
        super().__init__(module, number, running)
        core = module.core_attention
        self.has_relu = getattr(module.config, "dsa_indexer_scoring_relu", True)
        self.num_heads = max(self._heads, core.indexer.index_n_heads)
        self._core, self.indexer, self._caught = core, core.indexer, list[Tensor]()
        running.rotary.add(self.indexer.rotary_pos_emb)

    @property
    def topk(self) -> int:
        """How many keys a query sees at most, as it is now; the core's own number since 0.19."""
        most: int = getattr(self._core, "index_topk", self.indexer.index_topk)
        return most

    @property
    def scale(self) -> float:
        """Of attention's scores, as it is now."""
        scale: float = self._core.softmax_scale
        return scale

    @property
    def indexer_weights(self) -> list[Tensor]:
        """The indexer's that may be trained: stock gives them zeros."""
        return [weight for weight in self.indexer.parameters() if weight.requires_grad]

    def overrides(self) -> Iterator[Override]:
        """See Latents; and of the indexer, which gives no keys before 0.18."""
        yield from super().overrides()
        rotary = self.indexer.rotary_pos_emb
        yield rotary, "forward", self.angles(rotary, rotary.forward)
        if not hasattr(self.indexer, "forward_before_topk"):
            stock = self.indexer._compute_index_scores
            yield self.indexer, "_compute_index_scores", self._catching(stock)

    def core(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """The core attention's forward.

        Args:
            stock: Megatron's.
        """

        def forward(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            context = self._running.current
            if context is None:
                return stock(query, key, value, *args, **kwargs)
            loss = loss_of(context.parts) if self._core.training else None
            index = self.indexed(kwargs["x"], kwargs["qr"], trains=loss is not None)
            cache, number = context.cache, self._number
            if context.inner and cache.state(number, context.index) is SegmentState.EMPTY:
                context.between["index keys", number] = index.key.detach()
            if number == context.keys_only and loss is None:
                return keys_only(query, key, value, context, number, self)
            return sparse_attention(query, key, value, index, context, number, self, loss)

        return forward

    def left(self, context: SegmentContext, key: Tensor, value: Tensor) -> Payload:
        """See Shared: also index keys [positions, width]."""
        index_key: Tensor = context.between.pop(("index keys", self._number))
        return *super().left(context, key, value), index_key

    def keys(self, payload: Payload) -> KeyValue:
        """See Shared."""
        return super().keys(payload[:2])

    def keys_with_pull(self, payload: Payload) -> tuple[KeyValue, Pull]:
        """See Shared; the pull is given the gradient of index keys, too."""
        pair, pull = super().keys_with_pull(payload[:2])

        def with_index(gradients: Payload) -> tuple[Payload, Sequence[Tensor | None]]:
            kv_gradients, of_weights = pull((gradients[0], gradients[1]))
            return (*kv_gradients, *gradients[2:]), of_weights

        return pair, with_index

    def returned(self, context: SegmentContext, payload_grad: Payload, gradients: KeyValue) -> None:
        """See Shared."""
        super().returned(context, payload_grad[:2], gradients)

    def chosen(self, index: Index) -> Tensor:
        """See `choose`; ties are told once. It waits for the device."""
        result, tied = choose(index, self.topk, self.has_relu)
        if not Sparse.has_warned and tied.any():
            Sparse.has_warned = True
            logger.warning(
                "layer %d: keys tie at the end of the indexer's top-k for %d of %d queries. Which"
                " of them the stock schedule takes depends on the length of its rows, so both"
                " schedules may attend to different keys (docs/families/sparse-attention.md)",
                self._number, int(tied.sum()), len(tied),
            )  # fmt: skip
        return result

    def indexed(self, x: Tensor, low_rank: Tensor, *, trains: bool) -> Index:
        """What the stock indexer makes of a segment, [positions, 1, ...] each."""
        x, low_rank = x.detach(), low_rank.detach()
        with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
            if hasattr(self.indexer, "forward_before_topk"):
                query, key, weight = self.indexer.forward_before_topk(x, low_rank, None)
            else:
                self.indexer.forward_with_scores(x, low_rank)
                query, weight, key = self._caught
                self._caught.clear()
            return Index(query.squeeze(1), key.squeeze(1), weight.squeeze(1))

    def index_gradients(
        self, loss: IndexerLoss, index: Index, pair: KeyValue, picked: Tensor, weight: Tensor
    ) -> Index:
        """Gradients of the indexer's loss, which is told of some queries' divergences.

        Args:
            index: of these queries, and of all keys up to the last one's own.
            pair: queries and keys of attention.
            picked: keys that were chosen.
            weight: of the queries, float64 [queries].
        """
        num, keys = len(picked), len(index.key)
        is_sparse = getattr(self._core.config, "dsa_indexer_use_sparse_loss", False)  # as it is now
        is_visible = mask_of(picked, keys) if is_sparse else causal(num, keys, picked.device)
        target = attention_target(*pair, is_visible, self.scale, self.indexer.pg_collection.tp)
        with torch.enable_grad():
            leaves = Index(*(tensor.detach().requires_grad_() for tensor in index))
            each = divergences(target, index_scores(leaves, self.has_relu), is_visible)
            total = (each * weight.to(each.dtype)).sum()
        loss.add(self._core, total.detach())
        scale = (torch.ones_like(total) * scale_of_backward()).view_as(total)
        return Index(*torch.autograd.grad(total, leaves, scale))

    def _catching(self, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The indexer's scores; in a segment what they are made of is kept, and none are made."""

        def scores(query: Tensor, weights: Tensor, key: Tensor) -> Tensor:
            if self._running.current is None:
                return stock(query, weights, key)
            self._caught[:] = query, weights, key
            return query.new_zeros((1, 1, len(query)))

        return scores


class _SparseCall(NamedTuple):
    """What `sparse_attention` was called with, but for tensors with gradients."""

    context: SegmentContext
    layer: int
    shared: Sparse
    loss: IndexerLoss | None
    autocast: contextlib.AbstractContextManager[Any]
    num_weights: int

    def read(self) -> list[Payload]:
        """What ancestors have left, level by level."""
        cache, index = self.context.cache, self.context.index
        levels = (cache.level(index, number) for number in range(self.context.num_levels))
        return [cache.read(self.layer, index, level) for level in levels]


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Index,
    context: SegmentContext,
    layer: int,
    shared: Sparse,
    loss: IndexerLoss | None,
) -> Tensor:
    """Sparse attention of one segment in one layer.

    Args:
        query: [positions, 1, heads, dim].
        key: [positions, 1, heads, dim].
        value: [positions, 1, heads, value_dim].
        index: of its positions.
        context: the segment.
        layer: local index of the attention layer.
        shared: what the layer leaves for children.
        loss: of its indexer; None: it has none.

    Returns:
        [positions, 1, heads * value_dim], as Megatron's core attention returns it.
    """
    weights = shared.weights if context.num_levels else []
    cast = autocast_now(query.device.type)
    call = _SparseCall(context, layer, shared, loss, cast, len(weights))
    untrained = shared.indexer_weights if loss is None else []
    out: Tensor = _SparseAttention.apply(
        query.squeeze(1), key.squeeze(1), value.squeeze(1), call, *index, *weights, *untrained
    )
    return out.flatten(1).unsqueeze(1)


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: _SparseCall, *more: Tensor
    ) -> Tensor:
        own, weights = Index(*more[:3]), more[3:]
        context, layer, shared, loss, *_ = call
        context.capture(layer, shared, key, value)
        context.enter(layer, backward=context.backward)
        read = call.read()
        keys, values = _key_pool([shared.keys(payload) for payload in read], (key, value))
        index_keys = torch.cat([*(payload[2] for payload in read), own.key])
        parts, chosen = [], []
        for first, stop, rows in seen_of(context, shared.num_heads, query.device):
            local = Index(own.query[first:stop], index_keys[rows], own.weight[first:stop])
            chosen.append(shared.chosen(local))
            visible = keys[rows], values[rows], mask_of(chosen[-1], len(rows))
            parts.append(attend(query[first:stop], *visible, shared.scale))
        context.leave(layer, backward=False)
        ctx.call, ctx.indexer = call, [(x.shape, x.dtype) for x in weights[call.num_weights :]]
        ctx.save_for_backward(query, key, value, *(own if loss else ()), *chosen)
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _SparseCall = ctx.call
        context, layer, shared, loss, autocast, num_weights = call
        query, key, value, *saved = ctx.saved_tensors
        chosen = saved if loss is None else saved[3:]
        context.enter(layer, backward=True)
        read = call.read()
        created: list[tuple[KeyValue, Any]]
        with autocast:
            created = [shared.keys_with_pull(payload) for payload in read]
        pool = _key_pool([pair for pair, _ in created], (key, value))
        query_grad, *sums = _pool_gradients(call, query, pool, chosen, out_grad)
        of_index: list[Any] = [None] * 3
        if loss is None:
            sums.append(query.new_zeros((len(pool[0]), shared.indexer.index_head_dim)))
        else:
            own_index = Index(*saved[:3])
            of_index = [*_index_gradients(call, loss, own_index, read, query, pool[0], chosen)]
            sums.append(of_index[1])
        begin, of_weights = 0, list[Tensor | None]([None] * num_weights)
        for number, (pair, pull) in enumerate(created):
            end = begin + len(pair[0])
            *parts, of_index_keys = (total[begin:end] for total in sums)
            parts = [part.to(like.dtype) for part, like in zip(parts, pair, strict=True)]
            key_gradients, more_of = pull((*parts, of_index_keys))
            of_weights = [*map(sum_of, of_weights, more_of)]
            level, begin = context.cache.level(context.index, number), end
            context.cache.add(layer, context.index, level, key_gradients)
        own = sums[0][begin:].to(key.dtype), sums[1][begin:].to(value.dtype)
        sent_back = context.cache.take(layer, context.index) if context.inner else None
        if sent_back is not None:
            shared.returned(context, sent_back, own)
        if loss is not None:
            returned = 0 if sent_back is None else sent_back[2]
            of_index[1] = (sums[2][begin:] + returned).to(saved[1].dtype)
        context.leave(layer, backward=True)
        zeros = (out_grad.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.indexer)
        return query_grad, *own, None, *of_index, *of_weights, *zeros


def _pool_gradients(
    call: _SparseCall, query: Tensor, pool: KeyValue, chosen: Sequence[Tensor], out_grad: Tensor
) -> list[Tensor]:
    """Of queries, and in fp32 or wider of keys and values of the pool; arguments as there."""
    sums = [torch.zeros_like(tensor, dtype=wider(tensor.dtype)) for tensor in pool]
    query_grad = torch.empty_like(query)
    visible = seen_of(call.context, call.shared.num_heads, query.device)
    for (first, stop, rows), picked in zip(visible, chosen, strict=True):
        provided = [query[first:stop], *(tensor[rows] for tensor in pool)]
        is_visible = mask_of(picked, len(rows))
        gradients = gradients_of(provided, out_grad[first:stop], is_visible, call.shared.scale)
        query_grad[first:stop] = gradients[0]
        for total, extra in zip(sums, gradients[1:], strict=True):
            total.index_add_(0, rows, extra.to(total.dtype))
    return [query_grad, *sums]


def _index_gradients(
    call: _SparseCall,
    loss: IndexerLoss,
    own: Index,
    read: Sequence[Payload],
    query: Tensor,
    keys: Tensor,
    chosen: Sequence[Tensor],
) -> Index:
    """Of the loss of a segment's indexer, where keys are those of the pool, in fp32 or wider.

    Args:
        loss: is told of divergences.
        own: what the indexer made of the segment.
        read: see `_SparseCall`.
        query: of attention, [positions, heads, dim].
        keys: of attention, [keys of the pool, heads, dim].
        chosen: keys, of every span's queries.
    """
    context, shared = call.context, call.shared
    index_keys = torch.cat([*(payload[2] for payload in read), own.key])
    key_sum = torch.zeros_like(index_keys, dtype=wider(own.key.dtype))
    result = Index(torch.zeros_like(own.query), key_sum, torch.zeros_like(own.weight))
    weights = loss.weights(context.index)
    visible = seen_of(context, shared.num_heads, query.device)
    for (first, stop, rows), picked in zip(visible, chosen, strict=True):
        local = Index(own.query[first:stop], index_keys[rows], own.weight[first:stop])
        gradients = shared.index_gradients(
            loss, local, (query[first:stop], keys[rows]), picked, weights[first:stop]
        )
        result.query[first:stop], result.weight[first:stop] = gradients.query, gradients.weight
        key_sum.index_add_(0, rows, gradients.key.to(key_sum.dtype))
    return result


def _key_pool(levels: Sequence[KeyValue], own: KeyValue) -> KeyValue:
    """Keys and values of all levels and a segment's own, one after the other."""
    key, value = (torch.cat(parts) for parts in zip(*levels, own, strict=True))
    return key, value
