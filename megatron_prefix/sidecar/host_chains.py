"""K/V and gK/gV of some layers in host memory; on the device only while their layer runs.

K/V and gK/gV of a long prompt are most of a step's memory, and a layer uses only its own. Layers on
the host are spread among the others, so that copies for the next one run while several layers
compute. On the device are the chains of the layer that runs, of the next one on the host, and
gradients on their way back. Memory that is being copied is held until the computing stream has
waited for the copy, so the next layer can use it again without a wait of the host.
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
"""Visits whose copies to the host may still run."""


class HostLayers:
    """The layers of a model chunk that are on the host, for one step.

    Args:
        offloader: makes copies and has host memory.
        num_layers: attention layers of the model chunk.
        num_host: how many of them are on the host.
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
        """The next layer on the host from `layer` on, in the order in which layers run."""
        if backward:
            return max((number for number in self._layers if number <= layer), default=None)
        return min((number for number in self._layers if number >= layer), default=None)

    def chain(
        self, length: int, key: Tensor, value: Tensor, count: Callable[[int], None]
    ) -> HostChain:
        """A chain on the host; arguments as of `Chain`."""
        return HostChain(self, length, key, value, count)

    def hold(self, mark: Any, tensors: Sequence[Tensor]) -> None:
        """Keeps tensors until their copies to the host have been waited for."""
        self._counts.stored += sum(tensor.nbytes for tensor in tensors)
        self._leaving.append((mark, tensors))
        self._settle(LEAVING)

    def clear(self) -> None:
        """Waits for all copies."""
        self._settle(0)

    def _settle(self, left: int) -> None:
        while len(self._leaving) > left:
            mark, _ = self._leaving[0]
            self.transfers.wait(mark)
            self._leaving.popleft()


class HostChain(Chain):
    """A chain on the host that is on the device during a visit; see `Chain`.

    A visit begins with `fetch`, or with the first use, and ends with `leave`.
    """

    def __init__(
        self,
        host: HostLayers,
        length: int,
        key: Tensor,
        value: Tensor,
        count: Callable[[int], None],
    ) -> None:
        self._host, self._length = host, length
        self._likes = [like.new_empty((0, *like.shape[1:])) for like in (key, value)]
        self._there = _OnHost(host, length, self._likes)
        self._sums_there: _OnHost | None = None
        self._loaded = 0  # so many first positions of K/V are on the device
        self._summed = 0  # so many first positions of gK/gV are on the host
        self._changed = False
        self._pending: list[Any] = []
        super().__init__(0, key, value, count)

    def write(self, span: slice, key: Tensor, value: Tensor) -> None:
        """Copies K and V of a segment to its place, and from there to the host."""
        self.fetch(span.start, span.stop, gradients=False)
        super().write(span, key, value)
        self._loaded = span.stop
        # Clones: else the whole chain would have to stay until they are on the host.
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

    def fetch(self, loaded: int, length: int, *, gradients: bool) -> None:
        """Starts a visit: makes room for the first `length` positions of K/V, loads the first
        `loaded` of them from the host, and gK/gV if they are needed."""
        if len(self._keys[0]) < length:
            self.leave()
            self._keys = self._make(length, self._likes)
        if self._loaded < loaded:
            self._pending.append(self._there.load(self._keys, slice(self._loaded, loaded)))
            self._loaded = loaded
        if gradients and (self._gradients is None or len(self._gradients[0]) < length):
            self._end_sums()
            self._gradients = self._make(len(self._keys[0]), self._likes, sums=True)
            if self._sums_there is not None:
                there = slice(0, min(self._summed, len(self._keys[0])))
                self._pending.append(self._sums_there.load(self._gradients, there))

    def leave(self) -> None:
        """Ends a visit: changed gK/gV are copied to the host, device memory is freed."""
        self._arrive()
        self._end_sums()
        self._count(-sum(tensor.nbytes for tensor in self._keys))
        self._keys = self._likes
        self._loaded = 0

    def drop(self) -> None:
        """See `Chain.drop`."""
        self._changed = False  # the gradients are not needed any more
        self.leave()
        del self._there, self._sums_there

    def _end_sums(self) -> None:
        if self._gradients is None:
            return
        length = min(len(self._gradients[0]), self.num_open)
        if self._changed and length:
            if self._sums_there is None:
                sums = [like.to(wide(like)) for like in self._likes]
                self._sums_there = _OnHost(self._host, self._length, sums)
            self._sums_there.store([total[:length] for total in self._gradients], slice(0, length))
            self._summed = max(self._summed, length)
        self._count(-sum(tensor.nbytes for tensor in self._gradients))
        self._gradients, self._changed = None, False

    def _arrive(self) -> None:
        """Makes the computing stream wait for the loads."""
        for mark in self._pending:
            self._host.transfers.wait(mark)
        self._pending.clear()


class _OnHost:
    """K and V of a chain on the host, or gK and gV.

    Args:
        host: the layers on the host.
        length: positions of the chain.
        likes: two tensors; they give the shape of a position and the dtype.
    """

    def __init__(self, host: HostLayers, length: int, likes: Sequence[Tensor]) -> None:
        self._host, self._stored = host, None
        self._both = [_HostBuffer(host.pool, length, like) for like in likes]

    def store(self, tensors: Sequence[Tensor], span: slice) -> None:
        """Copies tensors to the positions `span`, and holds them until that is done."""
        self._stored = self._host.transfers.store(self._pairs(tensors, span), held=True)
        self._host.hold(self._stored, tensors)

    def load(self, tensors: Sequence[Tensor], span: slice) -> Any:
        """Copies the positions `span` to the same positions of tensors on the device.

        Returns:
            A mark to wait for.
        """
        pairs = self._pairs([tensor[span] for tensor in tensors], span)
        return self._host.transfers.fill(pairs, self._stored)

    def _pairs(self, tensors: Sequence[Tensor], span: slice) -> Pairs:
        both = zip(tensors, self._both, strict=True)
        return [pair for tensor, host in both for pair in host.pairs(tensor, span)]


class _HostBuffer:
    """[positions, ...] on the host, in pieces leased from a pool.

    Args:
        pool: of host memory.
        length: positions.
        like: a tensor; it gives the shape of a position and the dtype.
    """

    def __init__(self, pool: StagingPool, length: int, like: Tensor) -> None:
        self._shape, self._dtype = like.shape[1:], like.dtype
        size = self._shape.numel() * like.element_size()
        self._leases: list[Lease] = [
            pool.take(min(PIECE_KEYS, length - start) * size)
            for start in range(0, length, PIECE_KEYS)
        ]

    def pairs(self, device: Tensor, span: slice) -> Pairs:
        """(device, host) pairs: a tensor on the device, and the positions `span` on the host."""
        found = []
        for number, lease in enumerate(self._leases):
            first = number * PIECE_KEYS
            start, stop = max(span.start, first), min(span.stop, first + PIECE_KEYS)
            if start < stop:
                host = lease.tensor.view(self._dtype).view(-1, *self._shape)
                there, here = (slice(start - at, stop - at) for at in (first, span.start))
                found.append((device[here], host[there]))
        return found
