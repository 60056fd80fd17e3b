"""What attention leaves for the children of a span, and how they get keys and values of it.

Most layers leave K and V themselves (`KeysAndValues`). Those with a window leave the last ones
(windowed.py), multi-latent attention what children compute them from (latent.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_prefix.layers.blocks.interface import Runs
from megatron_prefix.sidecar.arena import Both, OwnKeys, Payload

if TYPE_CHECKING:
    from megatron_prefix.layers.segment import SegmentContext

Pull = Callable[[Both], tuple[Payload, Sequence[Tensor | None]]]
"""Of gradients of keys and values: those of the payload, and of the layer's `weights`."""


class Shared:
    """What one layer leaves, and the keys that are made of it.

    Attributes:
        is_keys: whether it is K and V, so that attention reads its own ones in the sidecar.
        window: positions before its own that a query sees; ancestors' keys are then among a span's
            own. None: all, level by level.
    """

    is_keys = False
    window: int | None = None

    @property
    def weights(self) -> Sequence[Tensor]:
        """What makes keys and values of it, and is trained."""
        return ()

    def own(self, context: SegmentContext, layer: int, both: Both) -> tuple[OwnKeys, Runs]:
        """A segment's own K and V, and what its queries see of them.

        Args:
            context: the segment.
            layer: its number in the sidecar.
            both: this rank's K and V, [positions, kv_heads, dim] each.
        """
        kept = context.inner and self.is_keys
        return context.cache.own_keys(layer, context.index, kept, both), context.runs

    def crossing(self) -> tuple[Tensor, ...]:
        """With a tap (`Running.tap`) what attention needs of what is before it, besides queries,
        keys and values; leaves of another place take its place later."""
        return ()

    def crossed(self, context: SegmentContext, value: Tensor, *crossing: Tensor) -> Tensor:
        """When the core runs, takes that; gives the values, from which a backward goes to it."""
        raise NotImplementedError

    def left(self, context: SegmentContext, key: Tensor, value: Tensor) -> Payload:
        """The payload of a segment with these K and V, [positions, kv_heads, dim] each."""
        raise NotImplementedError

    def returned(self, context: SegmentContext, sent: Payload, gradients: Both) -> None:
        """Adds what descendants have sent to the gradients of a segment's own K and V."""
        raise NotImplementedError

    def keys(self, payload: Payload) -> Both:
        """K and V of a level, [rows, kv_heads, dim] each."""
        raise NotImplementedError

    def keys_with_pull(self, payload: Payload) -> tuple[Both, Pull]:
        """The same, and what takes their gradients back; it is called once."""
        raise NotImplementedError


class KeysAndValues(Shared):
    """K and V are what is shared."""

    is_keys = True

    def left(self, context: SegmentContext, key: Tensor, value: Tensor) -> Payload:
        """See Shared."""
        return key, value

    def returned(self, context: SegmentContext, sent: Payload, gradients: Both) -> None:
        """See Shared."""
        for gradient, more in zip(gradients, sent, strict=True):
            gradient.add_(more)

    def keys(self, payload: Payload) -> Both:
        """See Shared."""
        key, value = payload
        return key, value

    def keys_with_pull(self, payload: Payload) -> tuple[Both, Pull]:
        """See Shared."""
        return self.keys(payload), lambda gradients: (gradients, ())


KEYS = KeysAndValues()
