"""What the sidecar asks of the payloads of one layer: a store, and a segment's own K and V.

On a single rank a layer's arena is its store, on the device (arena.py) or on the host
(host_arena.py). Among context-parallel ranks a transport is before the arena: payloads cross when
they are written (gathered.py) or when they are read (sharded.py). Only payloads of positions cross:
states are of heads, and every rank has those of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from megatron_prefix.sidecar.arena import Both, Payload
    from megatron_prefix.sidecar.cache import SidecarCache
    from megatron_prefix.tree.cp_layout import Index

Lengths = tuple[int, ...]


class Store(Protocol):
    """Payloads of one layer, and their gradients. The sidecar checks that they are there.

    Attributes:
        looks_ahead: whether `fetch` and `leave` do something.
        arena: the store that has the rows on this rank.
    """

    looks_ahead: bool

    @property
    def arena(self) -> Store: ...  # noqa: D102

    def mine(self, index: int) -> Index | None:
        """The rows of this rank's positions among those of a segment in the arena, span after span;
        None: all of them."""

    def keys(self, cache: SidecarCache, place: tuple[int, int], inner: bool, both: Both) -> OwnKeys:
        """See SidecarCache.own_keys; `place` is (layer, segment)."""

    def write(self, index: int, payload: Payload) -> None:
        """Copies in what a segment leaves on this rank; its gradients are zero from now on."""

    def own(self, index: int) -> Payload:
        """A segment's payload as it is kept, views."""

    def read(self, seen: Collection[int], what: Any) -> Payload:
        """What a segment reads (`what`, a Reading) of the segments `seen`, of all ranks."""

    def add(self, seen: Collection[int], what: Any, gradients: Payload) -> None:
        """Adds gradients of what `read` returns."""

    def sent(self, index: int) -> Payload | None:
        """Gradients of what a segment has left on this rank; None if there are none at all."""

    def fetch(self, seen: Collection[int], sums: Collection[int], levels: Iterable[Any]) -> None:
        """Starts to get what will be used: payloads of segments `seen`, gradients of segments
        `sums`, and `levels`, which will be read. The rest comes when it is used."""

    def leave(self) -> None:
        """Tells that the layer is not used for a while."""

    def drop(self) -> None:
        """Frees all memory."""


Transport = Callable[[Any, tuple[Lengths, ...]], Store]
"""Makes a layer's store over its arena; it gets the lengths of all segments' spans, whole."""


def no_transport(arena: Store, lengths: tuple[Lengths, ...]) -> Store:
    """The transport of a single rank: the arena is the store."""
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
    """OwnKeys of a single rank, where a run is a whole span; see SidecarCache.own_keys."""

    def __init__(
        self, cache: SidecarCache, place: tuple[int, int], inner: bool, both: Both
    ) -> None:
        if inner:
            cache.capture(*place, both)
            key, value = cache.own(*place)
            both = key, value
        self._cache, self._place, self._inner, self._both = cache, place, inner, both

    def runs(self) -> Both:
        """See OwnKeys."""
        return self._both

    def send(self, gradients: Both) -> None:
        """See OwnKeys."""
        self._both = gradients

    def take(self) -> Both:
        """See OwnKeys."""
        return added(self._both, self._cache.take(*self._place)) if self._inner else self._both


def added(mine: Both, sent: Payload | None) -> Both:
    """Gradients of K and V with those that descendants have sent, which are not rounded before."""
    return mine if sent is None else (sent[0] + mine[0], sent[1] + mine[1])
