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

from megatron_prefix.sidecar.arena import Both
from megatron_prefix.sidecar.cache import SegmentState, SidecarCache, on
from megatron_prefix.tree import cp_layout
from megatron_prefix.tree.kv_layout import ArenaMap


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
        planned: where this rank's part of every segment lies.
        num_layers: attention layers of the model chunk.
        exchange: the group's collectives.
        reduce: "wave" or "segment".
    """

    def __init__(self, planned: ArenaMap, num_layers: int, exchange: Exchange, reduce: str) -> None:
        super().__init__(planned, num_layers, exchange.size)
        self.exchange, self._once = exchange, reduce == "segment"
        self._views: dict[tuple[int, int, int], Pending] = {}
        self._sent: dict[int, list[tuple[int, int, Pending]]] = {}
        self._sums: dict[int, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes held now, with gathered views and sums of gradients."""
        sent = (pending for all_sent in self._sent.values() for *_, pending in all_sent)
        tensors = [*self._sums.values(), *(t for p in (*self._views.values(), *sent) for t in p[1])]
        return super().num_bytes + sum(t.numel() * t.element_size() for t in tensors)

    def capture(self, layer: int, index: int, key: Tensor, value: Tensor) -> None:
        """See SidecarCache."""
        if self.state(layer, index) is SegmentState.EMPTY and layer in self._sums:
            self._sums[layer][:, self.map.intervals[index]] = 0
        super().capture(layer, index, key, value)

    def prefetch(self, layer: int, index: int, *, backward: bool = False) -> None:
        """Starts to gather what a layer will read; `layer` may be out of range."""
        if 0 <= layer < self._num_layers:
            for number in range(len(self.map.levels[index])):
                self._gather(layer, index, number)

    def _gather(self, layer: int, index: int, number: int) -> None:
        key = layer, index, number
        if key not in self._views:
            self._views[key] = self.exchange.gather(*super().read(*key))

    def release(self, layer: int) -> None:
        """Drops the views of a layer."""
        for key in [key for key in self._views if key[0] == layer]:
            del self._views[key]

    def read(self, layer: int, index: int, number: int) -> Both:
        """K and V of a level on all ranks, [size * keys, kv_heads, dim], run after run."""
        self._gather(layer, index, number)
        both = self._views[layer, index, number].wait()
        order = self._run_order(index, number)
        if order is not None and self._views[layer, index, number].works:
            both = tuple(view.index_select(0, order) for view in both)
        self._views[layer, index, number] = Pending((), both)
        key, value = both
        return key, value

    def add_gradient(
        self, layer: int, index: int, number: int, key_grad: Tensor, value_grad: Tensor
    ) -> None:
        """Adds what a segment sends to the keys of a level (shapes of `read`)."""
        self._open(layer, index)
        view = side_by_side(key_grad, value_grad)
        order = self._run_order(index, number)
        if order is not None:
            view = torch.empty_like(view).index_copy_(0, order, view)
        if not self._once:
            self._settle(layer, index)
            pending = self.exchange.reduce_scatter(view)
            self._sent.setdefault(layer, []).append((index, number, pending))
            return
        part = view.unflatten(0, (self.parts, -1))
        total = self._sums.get(layer)
        if total is None:
            total = part.new_zeros((self.parts, self.map.length, *part.shape[2:]))
            self._sums[layer] = total
        rows = self.level(index, number).keys
        if isinstance(rows, slice):
            total[:, rows] += part
        else:
            total.index_add_(1, rows, part)

    def take_gradient(self, layer: int, index: int) -> Both | None:
        """The accumulated gK, gV of this rank's positions of a segment; see SidecarCache."""
        self._settle(layer, None)
        width = self.own(layer, index)[0].shape[-1]
        mine = super().take_gradient(layer, index)
        total = self._sums.get(layer)
        if total is None:
            return mine
        view = total[:, self.map.intervals[index]].flatten(0, 1)
        (both,) = self.exchange.reduce_scatter(view).wait()
        return both[..., :width], both[..., width:]

    def free(self, index: int, *, consumed: bool) -> None:
        """See SidecarCache."""
        super().free(index, consumed=consumed)
        for layer in range(self._num_layers):
            if layer not in self._arenas:
                self._sums.pop(layer, None)

    def clear(self) -> None:
        """See SidecarCache."""
        super().clear()
        for held in (self._views, self._sent, self._sums):
            held.clear()

    def _run_order(self, index: int, number: int) -> Tensor | None:
        """Where the keys of every run are in the gathered view, in which the ranks' keys of all
        runs lie end to end; None for a single run, whose order does not matter."""
        lengths = self.level(index, number).key_lengths
        if len(lengths) == 1:
            return None
        device = next(iter(self._arenas.values())).device
        return _runs_in_view(lengths, self.parts, device)

    def _settle(self, layer: int, newer: int | None) -> None:
        """Adds the results of a layer's reductions, but not those of the segment `newer`."""
        waiting = self._sent.get(layer, [])
        self._sent[layer] = [sent for sent in waiting if sent[0] == newer]
        for index, number, pending in waiting:
            if index != newer:
                (both,) = pending.wait()
                width = super().read(layer, index, number)[0].shape[-1]
                super().add_gradient(layer, index, number, both[..., :width], both[..., width:])


def side_by_side(key_grad: Tensor, value_grad: Tensor) -> Tensor:
    """gK and gV in one tensor [positions, kv_heads, dim + value_dim] of fp32 or wider."""
    dtype = torch.promote_types(key_grad.dtype, torch.float32)
    return torch.cat([key_grad.to(dtype), value_grad.to(dtype)], dim=-1)


@functools.lru_cache(maxsize=256)
def _runs_in_view(lengths: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """`cp_layout.runs_in_view` on the device."""
    return on(device, cp_layout.runs_in_view(lengths, size))


@functools.lru_cache(maxsize=256)
def _order(lengths: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """`cp_layout.order` on the device."""
    return on(device, cp_layout.order(lengths, size))
