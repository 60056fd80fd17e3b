"""What the sidecar asks of the payloads of one layer: a store, and a segment's own K and V in it.

On a single rank a store is the arena itself, on the device (sidecar/arena.py) or on the host
(sidecar/host_arena.py). Among context-parallel ranks a transport is between: what segments leave
crosses when it is written (sidecar/gathered.py) or when it is read (sidecar/sharded.py). Only rows
of positions cross; states are of heads, and every rank has those of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from megatron_prefix.sidecar.arena import Both, Payload
    from megatron_prefix.sidecar.cache import SidecarCache

Lengths = tuple[int, ...]


class Store(Protocol):
    """Payloads of one layer, and their gradients.

    It moves numbers. That they are there and wanted is checked by the sidecar, which has a store
    for every layer.

    Attributes:
        looks_ahead: whether `fetch` and `leave` do something.
    """

    looks_ahead: bool

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device now, with what is on its way from other ranks."""

    def keys(self, cache: SidecarCache, layer: int, index: int, inner: bool, both: Both) -> OwnKeys:
        """See SidecarCache.own_keys."""

    def write(self, index: int, payload: Payload) -> None:
        """Copies in what a segment leaves on this rank; its gradients are zero from now on."""

    def own(self, index: int) -> Payload:
        """A segment's payload as it is kept, views."""

    def read(self, seen: Iterable[int], what: Any) -> Payload:
        """What a segment reads (`what`, a Reading) of the segments `seen`, on all ranks."""

    def add(self, seen: Iterable[int], what: Any, gradients: Payload) -> None:
        """Adds gradients of what `read` returns."""

    def sent(self, index: int) -> Payload | None:
        """Gradients of what a segment has left on this rank; None if nothing was sent."""

    def fetch(self, seen: Iterable[int], sums: Iterable[int], levels: Iterable[Any]) -> None:
        """Starts to get what will be used: payloads of segments `seen`, gradients of segments
        `sums`, and what will be read of positions. What was not announced comes when it is used."""

    def leave(self) -> None:
        """Tells that the layer is not used for a while."""

    def drop(self) -> None:
        """Frees all memory."""


Transport = Callable[[Any, tuple[Lengths, ...]], Store]
"""Makes the store of a layer over its arena; given the lengths of all segments' spans, whole."""


def no_transport(arena: Store, lengths: tuple[Lengths, ...]) -> Store:
    """The transport of a single rank: the arena itself."""
    return arena


class OwnKeys(Protocol):
    """A segment's own K and V in one call of its attention, and their gradients."""

    def runs(self) -> Both:
        """K and V of this rank's own runs (`cp_layout.own_runs`), run after run."""

    def send(self, gradients: Both) -> None:
        """Gives the gradients of `runs` to the keys and values."""

    def take(self) -> Both:
        """The gradients of this rank's K and V, those of descendants included; after `send`."""


class LocalKeys:
    """Own K and V on a single rank, where a run is a whole span; see SidecarCache.own_keys."""

    def __init__(
        self, cache: SidecarCache, layer: int, index: int, inner: bool, both: Both
    ) -> None:
        if inner:
            cache.capture(layer, index, both)
            key, value = cache.own(layer, index)
            both = key, value
        self._both, self._place, self._cache = both, (layer, index), cache if inner else None

    def runs(self) -> Both:
        """See OwnKeys."""
        return self._both

    def send(self, gradients: Both) -> None:
        """See OwnKeys."""
        self._both = gradients

    def take(self) -> Both:
        """See OwnKeys."""
        if self._cache is None:
            return self._both
        return added(self._both, self._cache.take(*self._place))


def added(mine: Both, sent: Payload | None) -> Both:
    """Gradients of K and V, and what descendants have sent; not rounded before they are added."""
    return mine if sent is None else (sent[0] + mine[0], sent[1] + mine[1])
