"""A segment's own K and V in one call of its attention, and their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from megatron_prefix.sidecar.arena import Both, Payload
    from megatron_prefix.sidecar.cache import SidecarCache


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
