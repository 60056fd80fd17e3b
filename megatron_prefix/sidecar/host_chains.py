"""K/V and gK/gV of some layers in host memory; they are on the device while their layer runs.

K/V and gK/gV of a long prompt are most of what a step holds, and a layer uses its own only.  Layers
on the host are spread among the others, so that copies for the next one run beside the computation
of several.  On the device there are the chains of the layer that runs, of the next one on the host,
and gradients on their way back; memory on its way in either direction is held until the computing
stream has waited for the copy, and so serves the next layer without a wait of the host.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megatron_prefix.offload.pool import Lease, StagingPool
from megatron_prefix.offload.segment import Offloader
from megatron_prefix.offload.transfers import Pairs
from megatron_prefix.sidecar.chain import Chain, Sent, wide
from megatron_prefix.tree.kv_layout import PIECE_KEYS

LEAVING = 1
"""Visits whose stores nobody has waited for."""


class HostLayers:
    """The layers of a model chunk that are on the host, for one step.

    Args:
        offloader: copies and host memory.
        num_layers: attention layers of the model chunk.
        num_host: how many of them.
    """

    def __init__(self, offloader: Offloader, num_layers: int, num_host: int) -> None:
        self.transfers, self.pool = offloader.transfers, offloader.pool
        self._counts = offloader.counts
        share = min(num_host, num_layers)
        self._layers = [
            layer
            for layer in range(num_layers)
            if (layer + 1) * share // num_layers > layer * share // num_layers
        ]
        self._leaving: collections.deque[tuple[Any, Sequence[Tensor]]] = collections.deque()

    def __contains__(self, layer: int) -> bool:
        return layer in self._layers

    def near(self, layer: int, backward: bool) -> int | None:
        """The first layer on the host from `layer` on, in the order in which layers run."""
        if backward:
            return max((number for number in self._layers if number <= layer), default=None)
        return min((number for number in self._layers if number >= layer), default=None)

    def chain(
        self, rows: int, key: Tensor, value: Tensor, count: Callable[[int], None]
    ) -> HostChain:
        """A chain on the host; arguments as of `Chain`."""
        return HostChain(self, rows, key, value, count)

    def hold(self, mark: Any, tensors: Sequence[Tensor]) -> None:
        """Keeps tensors until their copy to the host has been waited for."""
        self._counts.stored += sum(tensor.nbytes for tensor in tensors)
        self._leaving.append((mark, tensors))
        self._settle(LEAVING)

    def clear(self) -> None:
        """Waits for all copies under way."""
        self._settle(0)

    def _settle(self, left: int) -> None:
        while len(self._leaving) > left:
            mark, _ = self._leaving[0]
            self.transfers.wait(mark)
            self._leaving.popleft()


class HostChain(Chain):
    """A chain whose rows are on the host and come to the device for a visit; see `Chain`.

    A visit begins with `fetch` (or with what is used first) and ends with `leave`.
    """

    def __init__(
        self,
        host: HostLayers,
        rows: int,
        key: Tensor,
        value: Tensor,
        count: Callable[[int], None],
    ) -> None:
        self._host, self._rows = host, rows
        self._likes = [like.new_empty((0, *like.shape[1:])) for like in (key, value)]
        self._there = _OnHost(host, rows, self._likes)
        self._sums_there: _OnHost | None = None
        self._loaded = self._summed = 0  # first rows: here, of K/V; there, of gK/gV
        self._changed = False
        self._pending: list[Any] = []
        super().__init__(0, key, value, count)

    def write(self, span: slice, key: Tensor, value: Tensor) -> None:
        """Copies K and V of a segment to its rows, and these to the host."""
        self.fetch(span.start, span.stop, gradients=False)
        super().write(span, key, value)
        self._loaded = span.stop
        # Copies, or all rows above would have to stay until these are on the host.
        self._there.store([whole[span].clone() for whole in self._keys], span)

    def read(self, stop: int) -> Sent:
        """See `Chain.read`."""
        self.fetch(stop, stop, gradients=False)
        self._arrive()
        return super().read(stop)

    def add(self, stop: int, start: int, key_grad: Tensor, value_grad: Tensor) -> None:
        """See `Chain.add`."""
        self.fetch(stop, stop, gradients=True)
        self._arrive()
        super().add(stop, start, key_grad, value_grad)
        self._changed = True

    def sent(self, span: slice) -> Sent | None:
        """See `Chain.sent`; the views last until `leave`."""
        if not (self._summed or self._gradients):
            return None
        self.fetch(span.stop, span.stop, gradients=True)
        self._arrive()
        return super().sent(span)

    def fetch(self, loaded: int, rows: int, *, gradients: bool) -> None:
        """Starts a visit: memory for the first `rows` rows of K/V, the first `loaded` of them from
        the host, and of gK/gV if they are wanted."""
        if len(self._keys[0]) < rows:
            self.leave()
            self._keys = self._make(rows, self._likes)
        if self._loaded < loaded:
            self._pending.append(self._there.load(self._keys, slice(self._loaded, loaded)))
            self._loaded = loaded
        if gradients and (self._gradients is None or len(self._gradients[0]) < rows):
            self._end_sums()
            self._gradients = self._make(len(self._keys[0]), self._likes, sums=True)
            if self._sums_there is not None:
                there = slice(0, min(self._summed, len(self._keys[0])))
                self._pending.append(self._sums_there.load(self._gradients, there))

    def leave(self) -> None:
        """Ends a visit: gK/gV that have changed go to the host, and the device's memory goes."""
        self._arrive()
        self._end_sums()
        self._count(-sum(tensor.nbytes for tensor in self._keys))
        self._keys = self._likes
        self._loaded = 0

    def drop(self) -> None:
        """See `Chain.drop`."""
        self._changed = False  # nobody will ask for them
        self.leave()
        del self._there, self._sums_there

    def _end_sums(self) -> None:
        if self._gradients is None:
            return
        rows = min(len(self._gradients[0]), self.num_open)
        if self._changed and rows:
            if self._sums_there is None:
                sums = [like.to(wide(like)) for like in self._likes]
                self._sums_there = _OnHost(self._host, self._rows, sums)
            self._sums_there.store([total[:rows] for total in self._gradients], slice(0, rows))
            self._summed = max(self._summed, rows)
        self._count(-sum(tensor.nbytes for tensor in self._gradients))
        self._gradients, self._changed = None, False

    def _arrive(self) -> None:
        """Lets what is computed from here on see what is loaded."""
        for mark in self._pending:
            self._host.transfers.wait(mark)
        self._pending.clear()


class _OnHost:
    """K and V of a chain on the host, or gK and gV.

    Args:
        host: the layers on the host.
        rows: of the chain.
        likes: two tensors with rows of that shape and dtype.
    """

    def __init__(self, host: HostLayers, rows: int, likes: Sequence[Tensor]) -> None:
        self._host, self._stored = host, None
        self._both = [_HostRows(host.pool, rows, like) for like in likes]

    def store(self, tensors: Sequence[Tensor], span: slice) -> None:
        """Copies tensors to rows of `span`, and holds them until that is done."""
        self._stored = self._host.transfers.store(self._pairs(tensors, span), held=True)
        self._host.hold(self._stored, tensors)

    def load(self, tensors: Sequence[Tensor], span: slice) -> Any:
        """Copies rows of `span` to the same rows of tensors on the device.

        Returns:
            A mark to wait for.
        """
        pairs = self._pairs([tensor[span] for tensor in tensors], span)
        return self._host.transfers.fill(pairs, self._stored)

    def _pairs(self, tensors: Sequence[Tensor], span: slice) -> Pairs:
        both = zip(tensors, self._both, strict=True)
        return [pair for tensor, host in both for pair in host.pairs(tensor, span)]


class _HostRows:
    """[rows, ...] on the host, in pieces as a pool leases them.

    Args:
        pool: of host memory.
        rows: how many.
        like: a tensor with rows of that shape and dtype.
    """

    def __init__(self, pool: StagingPool, rows: int, like: Tensor) -> None:
        self._row, self._dtype = like.shape[1:], like.dtype
        size = self._row.numel() * like.element_size()
        self._leases: list[Lease] = [
            pool.take(min(PIECE_KEYS, rows - start) * size) for start in range(0, rows, PIECE_KEYS)
        ]

    def pairs(self, device: Tensor, span: slice) -> Pairs:
        """The rows of a tensor on the device, beside where `span` is on the host."""
        found = []
        for number, lease in enumerate(self._leases):
            first = number * PIECE_KEYS
            start, stop = max(span.start, first), min(span.stop, first + PIECE_KEYS)
            if start < stop:
                host = lease.tensor.view(self._dtype).view(-1, *self._row)
                there, here = (slice(start - at, stop - at) for at in (first, span.start))
                found.append((device[here], host[there]))
        return found
