"""Multi-latent attention of segments: a span leaves latents, its children expand them.

A position's latent is the input of the layer's stock projection to keys and values; with the
rotated part of its key, which all heads have in common, it is all that descendants need
("DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model", section
2.1.2). A level of ancestors is expanded where it is read, forward and again backward, and freed:
expanded keys and values of DeepSeek-V3 are 71 times as wide.

What descendants send back enters at the input of the projection. With sequence parallelism every
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
from megatron_prefix.sidecar.arena import Both, Payload, wider
from megatron_prefix.sidecar.cache import SegmentState

if TYPE_CHECKING:
    from megatron_prefix.layers.kind import Override, Running
    from megatron_prefix.layers.segment import SegmentContext


class Latents(Shared):
    """What one layer of multi-latent attention leaves; see Shared.

    What one method leaves for another is in the segment's context: latents from the projection's
    forward for `left`, what `returned` gets for the projection's backward. With recomputation these
    are in other graphs.

    Args:
        module: Megatron's MLASelfAttention.
        number: of the layer in the sidecar.
        running: says which segment runs.
    """

    def __init__(self, module: Any, number: int, running: Running) -> None:
        config = module.config
        self._module, self._number, self._running = module, number, running
        self._group = module.pg_collection.tp
        self._ranks = self._group.size() if config.sequence_parallel else 1
        self._heads = module.num_attention_heads_per_partition
        self._plain, self._value_width = config.qk_head_dim, config.v_head_dim
        self._project = module.linear_kv_up_proj.forward
        self._rotary = module.rotary_pos_emb
        running.rotary.add(self._rotary)
        self._latents: Tensor | None = None  # with a tap

    @property
    def weights(self) -> list[Tensor]:
        """See Shared: of the projection."""
        found = self._module.linear_kv_up_proj.parameters()
        return [weight for weight in found if weight.requires_grad]

    def overrides(self) -> Iterator[Override]:
        """Methods of the layer's modules, but for its core attention's."""
        rotary = self._rotary
        yield self._module.linear_kv_up_proj, "forward", self._projecting
        yield rotary, "forward", self.angles(rotary, rotary.forward)
        if hasattr(rotary, "get_cached_cos_sin"):
            yield rotary, "get_cached_cos_sin", self._turns(rotary.get_cached_cos_sin)

    def left(self, context: SegmentContext, key: Tensor, value: Tensor) -> Payload:
        """See Shared: latents [positions, rank], and rotated parts of keys [positions, width]."""
        latents: Tensor = context.between.pop(("latents", self._number))
        return latents, key[:, 0, self._plain :]

    def keys(self, payload: Payload) -> Both:
        """See Shared."""
        latents, turned = payload
        return self._joined(self._expanded(latents), turned)

    def keys_with_pull(self, payload: Payload) -> tuple[Both, Pull]:
        """See Shared."""
        latents, turned = payload
        with torch.enable_grad():
            given = latents.detach().requires_grad_()
            made = self._expanded(given)

        def pull(gradients: Both) -> tuple[Payload, list[Tensor | None]]:
            key_grad, value_grad = gradients
            made_grad = torch.cat([key_grad[..., : self._plain], value_grad], dim=-1)
            # A nested `backward` would run DDP's hooks on the weights too often.
            found = torch.autograd.grad(made, (given, *self.weights), made_grad, allow_unused=True)
            turned_grad = key_grad[..., self._plain :].sum(1, dtype=wider(turned.dtype))
            return (found[0], turned_grad), [*found[1:]]

        return self._joined(made.detach(), turned), pull

    def returned(self, context: SegmentContext, sent: Payload, gradients: Both) -> None:
        """See Shared; that of latents waits for the projection's backward."""
        latents_grad, turned_grad = sent
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
        """What the stock projection makes of latents, [rows, heads, plain + value width]."""
        rows, mine = len(latents), latents
        if self._ranks > 1:
            more = -rows % self._ranks
            padded = torch.cat([mine, mine.new_zeros((more, mine.shape[1]))]) if more else mine
            mine = padded.chunk(self._ranks)[self._group.rank()]
        made, _ = self._project(mine.unsqueeze(1))
        return made.view(-1, self._heads, self._plain + self._value_width)[:rows]

    def _joined(self, made: Tensor, turned: Tensor) -> Both:
        """Keys and values of what the projection has made, and rotated parts [rows, width]."""
        plain, value = made.split([self._plain, self._value_width], dim=-1)
        return torch.cat([plain, turned.unsqueeze(1).expand(-1, self._heads, -1)], dim=-1), value

    def _projecting(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The projection's forward: keeps its input for descendants, and lets gradients in."""
        context = self._running.current
        self._latents = None  # of a layer that has failed
        if self._running.tap is not None:
            x, self._latents = _crossing(x)
        elif context is not None and context.inner:
            self._keep(context, x)
            x = with_backward(lambda x: x.view_as(x), self._pulled, x)
        return self._project(x, *args, **kwargs)

    def _keep(self, context: SegmentContext, x: Tensor) -> None:
        """Keeps this rank's latents [positions, 1, rank] for `left`."""
        if context.cache.state(self._number, context.index) is SegmentState.EMPTY:
            context.between["latents", self._number] = self._whole(x.detach()).squeeze(1)

    def crossing(self) -> tuple[Tensor, ...]:
        """See Shared: latents."""
        latents, self._latents = self._latents, None
        return () if latents is None else (latents,)

    def crossed(self, context: SegmentContext, value: Tensor, *crossing: Tensor) -> Tensor:
        """See Shared; the gradient of latents is what descendants have sent."""
        if not context.inner:
            return value
        [latents] = crossing
        self._keep(context, latents.detach().to(value.dtype))
        found: Tensor = with_backward(
            lambda value, _: value.view_as(value),
            lambda gradient: (gradient, self.arrived()),
            value, latents,
        )  # fmt: skip
        return found

    def _whole(self, mine: Tensor) -> Tensor:
        """The rows of all sequence-parallel ranks."""
        if self._ranks == 1:
            return mine
        whole = mine.new_empty((self._ranks * len(mine), *mine.shape[1:]))
        dist.all_gather_into_tensor(whole, mine.contiguous(), group=self._group)
        return whole

    def _pulled(self, gradient: Tensor) -> Tensor:
        """A gradient of this rank's latents with what descendants have sent; both are summed before
        they are rounded."""
        sent = self.arrived()
        return gradient if sent is None else (gradient + sent).to(gradient.dtype)

    def arrived(self) -> Tensor | None:
        """What descendants have sent to this rank's latents, [positions, 1, rank]."""
        sent = self._context.between.pop(("gradients", self._number), None)
        if sent is None or self._ranks == 1:
            return None if sent is None else sent.unsqueeze(1)
        mine = sent.new_empty((len(sent) // self._ranks, *sent.shape[1:]))
        dist.reduce_scatter_tensor(mine, sent, group=self._group)
        return mine.unsqueeze(1)

    def angles(self, rotary: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
        """A rotary embedding's forward; in a segment, of its own positions."""

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


def _crossing(latents: Tensor) -> tuple[Tensor, Tensor]:
    """Latents, and a wider copy of them: the gradients of both are summed before they are rounded,
    as in `Latents._pulled`."""
    dtype, wide = latents.dtype, wider(latents.dtype)
    found: tuple[Tensor, Tensor] = with_backward(
        lambda latents: (latents.view_as(latents), latents.to(wide, copy=True)),
        lambda gradient, sent: (gradient + sent).to(dtype),
        latents,
    )
    return found
