"""Multi-latent attention of segments: the payload is latents, which children expand.

A position's latent is the input of the layer's stock projection to keys and values. With the
rotated part of its key, which all heads share, it is all that descendants need ("DeepSeek-V2: A
Strong, Economical, and Efficient Mixture-of-Experts Language Model", section 2.1.2). A level of
ancestors is expanded where it is read, forward and again backward, and freed: expanded keys and
values of DeepSeek-V3 are 71 times as wide.

Gradients from descendants enter at the input of the projection. With sequence parallelism every
tensor-parallel rank keeps all latents and projects its share of the rows, as Megatron does with a
segment's own; so its sums are a part of the gradient, and are reduced once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.layers.blocks.shared import Pull, Shared
from megatron_prefix.layers.own_backward import with_backward
from megatron_prefix.sidecar.arena import KeyValue, Payload, wider
from megatron_prefix.sidecar.cache import SegmentState

if TYPE_CHECKING:
    from megatron_prefix.layers.kind import Override, Running
    from megatron_prefix.layers.segment import SegmentContext


class Latents(Shared):
    """The payload of one layer of multi-latent attention.

    Methods hand tensors to one another in the segment's context, as with recomputation they run in
    different graphs: latents from the projection's forward to `left`, gradients from `returned` to
    the projection's backward.

    Args:
        module: Megatron's MLASelfAttention.

    Attributes:
        projection: of latents to keys and values, by the name that it has in the module.
        sharded: whether sequence-parallel ranks each project a part of the rows.
    """

    projection, sharded = "linear_kv_up_proj", True

    def __init__(self, module: Any, number: int, running: Running) -> None:
        config = module.config
        self._module, self._number, self._running = module, number, running
        self._group = module.pg_collection.tp
        self._ranks = self._group.size() if config.sequence_parallel and self.sharded else 1
        self._heads = config.num_attention_heads // self._group.size()
        self._plain, self._value_width = config.qk_head_dim, config.v_head_dim
        self._projection = getattr(module, self.projection)
        self._project = self._projection.forward
        self._rotary: Any = getattr(module, "rotary_pos_emb", None)
        if self._rotary is not None:
            running.rotary.add(self._rotary)
        self._latents: Tensor | None = None  # with a tap

    @property
    def weights(self) -> list[Tensor]:
        return [weight for weight in self._projection.parameters() if weight.requires_grad]

    def overrides(self) -> Iterator[Override]:
        rotary = self._rotary
        yield self._projection, "forward", self._projecting
        if rotary is None:
            return
        yield rotary, "forward", self.angles(rotary, rotary.forward)
        if hasattr(rotary, "get_cached_cos_sin"):
            yield rotary, "get_cached_cos_sin", self._turns(rotary.get_cached_cos_sin)

    def left(self, context: SegmentContext, key: Tensor, value: Tensor) -> Payload:
        """Latents [positions, rank], and rotated parts of keys [positions, width]."""
        latents: Tensor = context.between.pop(("latents", self._number))
        return latents, key[:, 0, self._plain :]

    def keys(self, payload: Payload) -> KeyValue:
        latents, turned = payload
        return self._joined(self._expanded(latents), turned)

    def keys_with_pull(self, payload: Payload) -> tuple[KeyValue, Pull]:
        latents, turned = payload
        with torch.enable_grad():
            leaf = latents.detach().requires_grad_()
            expanded = self._expanded(leaf)

        def pull(gradients: KeyValue) -> tuple[Payload, list[Tensor | None]]:
            key_grad, value_grad = gradients
            made_grad = torch.cat([key_grad[..., : self._plain], value_grad], dim=-1)
            # A nested `backward` would run DDP's hooks on the weights too often.
            gradients_of = torch.autograd.grad(
                expanded, (leaf, *self.weights), made_grad, allow_unused=True
            )
            turned_grad = key_grad[..., self._plain :].sum(1, dtype=wider(turned.dtype))
            return (gradients_of[0], turned_grad), [*gradients_of[1:]]

        return self._joined(expanded.detach(), turned), pull

    def returned(self, context: SegmentContext, returned: Payload, gradients: KeyValue) -> None:
        """The gradient of latents waits for the projection's backward."""
        latents_grad, turned_grad = returned
        gradients[0][:, 0, self._plain :].add_(turned_grad)
        # Not `context`, that of the forward. A copy: the arena's rows will be others' again.
        self._context.between["gradients", self._number] = latents_grad.clone()

    @property
    def _context(self) -> SegmentContext:
        context = self._running.current
        if context is None:
            raise RuntimeError("no segment runs")
        return context

    def _expanded(self, latents: Tensor) -> Tensor:
        """The stock projection of latents, [rows, heads, plain + value width]."""
        rows, local = len(latents), latents
        if self._ranks > 1:
            if padding := -rows % self._ranks:
                local = torch.cat([local, local.new_zeros((padding, local.shape[1]))])
            local = local.chunk(self._ranks)[self._group.rank()]
        expanded, _ = self._project(local.unsqueeze(1))
        return expanded.view(-1, self._heads, self._plain + self._value_width)[:rows]

    def _joined(self, expanded: Tensor, turned: Tensor) -> KeyValue:
        """K and V of projected latents and rotated parts [rows, width]."""
        plain, value = expanded.split([self._plain, self._value_width], dim=-1)
        return torch.cat([plain, turned.unsqueeze(1).expand(-1, self._heads, -1)], dim=-1), value

    def _projecting(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The projection's forward: saves its input for descendants, and adds their gradients in
        the backward."""
        context = self._running.current
        self._latents = None  # of a layer that has failed
        if self._running.tap is not None:
            x, self._latents = _with_wide_copy(x)
        elif context is not None and context.inner:
            self._keep(context, x)
            x = with_backward(lambda x: x.view_as(x), self._pulled, x)
        return self._project(x, *args, **kwargs)

    def _keep(self, context: SegmentContext, x: Tensor) -> None:
        if context.cache.state(self._number, context.index) is SegmentState.EMPTY:
            context.between["latents", self._number] = self._whole(x.detach()).squeeze(1)

    def crossing(self) -> tuple[Tensor, ...]:
        latents, self._latents = self._latents, None
        return () if latents is None else (latents,)

    def crossed(self, context: SegmentContext, value: Tensor, *crossing: Tensor) -> Tensor:
        if not context.inner:
            return value
        [latents] = crossing
        self._keep(context, latents.detach().to(value.dtype))
        result: Tensor = with_backward(
            lambda value, _: value.view_as(value),
            lambda gradient: (gradient, self.arrived()),
            value, latents,
        )  # fmt: skip
        return result

    def _whole(self, local: Tensor) -> Tensor:
        if self._ranks == 1:
            return local
        all_rows = local.new_empty((self._ranks * len(local), *local.shape[1:]))
        dist.all_gather_into_tensor(all_rows, local.contiguous(), group=self._group)
        return all_rows

    def _pulled(self, gradient: Tensor) -> Tensor:
        """The gradient of this rank's latents plus that from descendants, rounded once."""
        returned = self.arrived()
        return gradient if returned is None else (gradient + returned).to(gradient.dtype)

    def arrived(self) -> Tensor | None:
        """Gradients from descendants to this rank's latents, [positions, 1, rank]."""
        returned = self._context.between.pop(("gradients", self._number), None)
        if returned is None or self._ranks == 1:
            return None if returned is None else returned.unsqueeze(1)
        local = returned.new_empty((len(returned) // self._ranks, *returned.shape[1:]))
        dist.reduce_scatter_tensor(local, returned, group=self._group)
        return local.unsqueeze(1)

    def angles(self, rotary: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            context = self._running.current
            if context is None:
                return stock(*args, **kwargs)
            angles, scale = self._running.rotary.of(rotary, context.positions)
            return (angles, scale) if self._module.config.rope_type == "yarn" else angles

        return forward

    def _turns(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """The cosines and sines that fused kernels take; in a segment, of its own positions."""

        def get_cached_cos_sin(
            seq_len: int,
            offset: int = 0,
            dtype: torch.dtype | None = None,
            packed_seq: bool = False,
        ) -> Any:
            context, dtype = self._running.current, dtype or torch.get_default_dtype()
            if context is None:
                return stock(seq_len, offset=offset, dtype=dtype, packed_seq=packed_seq)
            angles, scale = self._running.rotary.of(self._rotary, context.positions)
            return tuple([(turn(angles) * scale).to(dtype) for turn in (torch.cos, torch.sin)])

        return get_cached_cos_sin


def _with_wide_copy(latents: Tensor) -> tuple[Tensor, Tensor]:
    """Latents, and a wider copy of them; the gradients of both are summed before rounding."""
    dtype, wide = latents.dtype, wider(latents.dtype)
    result: tuple[Tensor, Tensor] = with_backward(
        lambda latents: (latents.view_as(latents), latents.to(wide, copy=True)),
        lambda gradient, returned: (gradient + returned).to(dtype),
        latents,
    )
    return result
