"""Context parallelism: K/V are gathered before a block, and gK/gV are sent back to the owners.

Every span of a segment is cut zig-zag (megatron_prefix/tree/cp_layout.py). Queries stay on their
rank. Ranks exchange K/V in the forward, gK/gV in the backward and, on the last stage, the outputs
of scored segments, one number a token. The sidecar keeps the rank's own positions.

A segment reads its ancestors' K/V in the order of the all-gather: softmax over keys that all
queries see does not depend on their order. The gather of the next layer runs while this layer
computes: collectives run on the process group's own stream (with gloo on its threads), and only the
reader waits. Gradients of a gathered view are summed and reduced in fp32 or wider. "The Llama 3
Herd of Models", section 3.3.2, gathers in the same way, but only a layer's own keys.

All ranks of a context-parallel group run the same plan, so all make these calls in one order, as
collectives require.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.sidecar.cache import SidecarCache
from megatron_prefix.tree import Segment, cp_layout
from megatron_prefix.tree.kv_layout import Block


class Pending(NamedTuple):
    """Tensors that collectives are writing; `wait` before reading them."""

    works: tuple[Any, ...]
    tensors: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        """Waits and returns the tensors (on CUDA the stream waits, not the host)."""
        for work in self.works:
            work.wait()
        return self.tensors


class Exchange:
    """The collectives of one context-parallel group.

    Args:
        group: the process group.

    Attributes:
        rank: this rank's number in it.
        size: number of ranks.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def gather(self, *slices: Tensor) -> Pending:
        """All ranks' slices [positions, ...] as views [size * positions, ...]."""
        works, views = [], []
        for mine in slices:
            view = mine.new_empty((self.size * mine.shape[0], *mine.shape[1:]))
            works.append(
                dist.all_gather_into_tensor(view, mine.contiguous(), self._group, async_op=True)
            )
            views.append(view)
        return Pending(tuple(works), tuple(views))

    def reduce_scatter(self, view: Tensor) -> Pending:
        """This rank's part [positions, ...] of the sum of all views [size * positions, ...]."""
        mine = view.new_empty((view.shape[0] // self.size, *view.shape[1:]))
        work = dist.reduce_scatter_tensor(mine, view.contiguous(), group=self._group, async_op=True)
        return Pending((work,), (mine,))

    def whole(self, mine: Tensor, lengths: Sequence[int]) -> Tensor:
        """A whole segment [1, positions, ...] in order, from the ranks' parts.

        Args:
            mine: this rank's part [1, positions / size, ...].
            lengths: of the segment's spans; they sum to `positions`.
        """
        (view,) = self.gather(mine.squeeze(0)).wait()
        return view.index_select(0, _order(tuple(lengths), self.size, mine.device)).unsqueeze(0)

    def share(self, whole: Tensor, lengths: Sequence[int]) -> Tensor:
        """The reverse of `whole` for gradients: this rank's part of the sum over ranks."""
        view = torch.empty_like(whole[0])
        view[_order(tuple(lengths), self.size, whole.device)] = whole[0]
        (mine,) = self.reduce_scatter(view).wait()
        return mine.unsqueeze(0)


class ShardedCache(SidecarCache):
    """The sidecar of a context-parallel rank: its own positions of every inner segment.

    Reads return whole views, gathered one layer at a time. Gradients of views are sent to the
    owners at once ("wave"), or summed here and sent when the backward of their segment takes them
    ("segment").

    Args:
        segments: the step's segments.
        num_layers: attention layers of the model chunk.
        exchange: the group's collectives.
        reduce: "wave" or "segment".
    """

    def __init__(
        self, segments: Sequence[Segment], num_layers: int, exchange: Exchange, reduce: str
    ) -> None:
        super().__init__(segments, num_layers, exchange.size)
        self.exchange, self._once = exchange, reduce == "segment"
        self._views: dict[tuple[int, Block], Pending] = {}
        self._sent: dict[tuple[int, int], tuple[Block, Pending]] = {}
        self._sums: dict[tuple[int, int], Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes held now, with gathered views and sums of gradients."""
        pending = [*self._views.values(), *(pending for _, pending in self._sent.values())]
        tensors = [*self._sums.values(), *(t for p in pending for t in p.tensors)]
        return super().num_bytes + sum(t.numel() * t.element_size() for t in tensors)

    def prefetch(self, layer: int, index: int, *, backward: bool = False) -> None:
        """Starts to gather what a layer will read; `layer` may be out of range."""
        if 0 <= layer < self._num_layers:
            for block in self.map.blocks[index]:
                self._gather(layer, block)

    def _gather(self, layer: int, block: Block) -> None:
        if (layer, block) not in self._views:
            self._views[layer, block] = self.exchange.gather(*super().read(layer, block))

    def release(self, layer: int) -> None:
        """Drops the views of a layer."""
        for key in [key for key in self._views if key[0] == layer]:
            del self._views[key]

    def read(self, layer: int, block: Block) -> tuple[Tensor, Tensor]:
        """K and V of a dense block on all ranks, views [size * positions, kv_heads, dim]."""
        self._gather(layer, block)
        key, value = self._views[layer, block].wait()
        self._views[layer, block] = Pending((), (key, value))
        return key, value

    def pieces(self, block: Block) -> list[slice]:
        """One piece, the whole view: its gradients are sent in one message."""
        return [slice(0, self.parts * block.stop)]

    def add_gradient(
        self, layer: int, block: Block, key_grad: Tensor, value_grad: Tensor, start: int = 0
    ) -> None:
        """Adds a wave's gK, gV of a view (shapes of `read`), which is one piece."""
        self._open(layer, block)
        if not self._once:
            self._settle(layer, block.head)
            pending = self.exchange.reduce_scatter(side_by_side(key_grad, value_grad))
            self._sent[layer, block.head] = block, pending
            return
        part = side_by_side(key_grad, value_grad).unflatten(0, (self.parts, -1))
        total = self._sums.get((layer, block.head))
        if total is None:
            length = self.map.length[block.head]
            total = part.new_zeros((self.parts, length, *part.shape[2:]))
            self._sums[layer, block.head] = total
        total[:, : block.stop] += part

    def take_gradient(self, layer: int, index: int) -> tuple[Tensor, Tensor] | None:
        """The accumulated gK, gV of this rank's positions of a segment; see SidecarCache."""
        head = self.map.head[index]
        self._settle(layer, head)
        width = self.own(layer, index)[0].shape[-1]
        mine = super().take_gradient(layer, index)
        total = self._sums.get((layer, head))
        if total is None:
            return mine
        view = total[:, self._span(index)].flatten(0, 1)
        (both,) = self.exchange.reduce_scatter(view).wait()
        return both[..., :width], both[..., width:]

    def free(self, index: int, *, consumed: bool) -> None:
        """See SidecarCache."""
        super().free(index, consumed=consumed)
        for layer in range(self._num_layers):
            self._sums.pop((layer, index), None)

    def clear(self) -> None:
        """See SidecarCache."""
        super().clear()
        for held in (self._views, self._sent, self._sums):
            held.clear()

    def _settle(self, layer: int, head: int) -> None:
        """Adds the result of the last reduction of a chain's gradients."""
        if (layer, head) not in self._sent:
            return
        block, pending = self._sent.pop((layer, head))
        (both,) = pending.wait()
        width = super().read(layer, block)[0].shape[-1]
        super().add_gradient(layer, block, both[..., :width], both[..., width:])


def side_by_side(key_grad: Tensor, value_grad: Tensor) -> Tensor:
    """gK and gV in one tensor [positions, kv_heads, dim + value_dim] of fp32 or wider."""
    dtype = torch.promote_types(key_grad.dtype, torch.float32)
    return torch.cat([key_grad.to(dtype), value_grad.to(dtype)], dim=-1)


def on(device: torch.device, index: cp_layout.Index) -> Tensor:
    """Indices on the device; the host does not wait."""
    host = torch.from_numpy(index)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


@functools.lru_cache(maxsize=256)
def _order(lengths: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """`cp_layout.order` on the device."""
    return on(device, cp_layout.order(lengths, size))
