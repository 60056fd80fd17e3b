"""Payloads of attention layers, and how a span's children get keys and values from them.

The payload is K and V (`KeysAndValues`), with a window the last ones (features/windows),
with multi-latent attention the latents (features/mla).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_prefix.layers.blocks.interface import Runs
from megatron_prefix.sidecar.arena import KeyValue, OwnKeys, Payload

if TYPE_CHECKING:
    from megatron_prefix.layers.segment import SegmentContext

Pull = Callable[[KeyValue], tuple[Payload, Sequence[Tensor | None]]]
"""Gradients of keys and values -> those of the payload, and of the layer's `weights`."""


class Shared:
    """The payload of one layer, and the keys and values made of it.

    Attributes:
        is_keys: whether the payload is K and V, so that attention reads its own in the sidecar.
        window: positions before its own that a query sees; ancestors' keys then precede a span's
            own in one call. None: all, level by level.
    """

    is_keys = False
    window: int | None = None

    @property
    def weights(self) -> Sequence[Tensor]:
        """Trained weights that make keys and values of the payload."""
        return ()

    def own(self, context: SegmentContext, layer: int, key_value: KeyValue) -> tuple[OwnKeys, Runs]:
        """A segment's own K and V, and the runs of its queries.

        Args:
            key_value: this rank's K and V, [positions, kv_heads, dim] each.
        """
        saved = context.inner and self.is_keys
        return context.cache.own_keys(layer, context.index, saved, key_value), context.runs

    def crossing(self) -> tuple[Tensor, ...]:
        """With a tap (`Running.tap`) further tensors that pass from before attention to it; at a
        replay leaves elsewhere take their place."""
        return ()

    def crossed(self, context: SegmentContext, value: Tensor, *crossing: Tensor) -> Tensor:
        """When the core runs: `value`, whose backward also reaches the tensors of `crossing`."""
        raise NotImplementedError

    def left(self, context: SegmentContext, key: Tensor, value: Tensor) -> Payload:
        """The payload of a segment with these K and V, [positions, kv_heads, dim] each."""
        raise NotImplementedError

    def returned(self, context: SegmentContext, payload_grad: Payload, gradients: KeyValue) -> None:
        """Adds gradients from descendants to those of a segment's own K and V, in place."""
        raise NotImplementedError

    def keys(self, payload: Payload) -> KeyValue:
        """[rows, kv_heads, dim] each."""
        raise NotImplementedError

    def keys_with_pull(self, payload: Payload) -> tuple[KeyValue, Pull]:
        """`keys`, and a function, called once, that takes their gradients back."""
        raise NotImplementedError


class KeysAndValues(Shared):
    """The payload is K and V."""

    is_keys = True

    def left(self, context: SegmentContext, key: Tensor, value: Tensor) -> Payload:
        return key, value

    def returned(self, context: SegmentContext, payload_grad: Payload, gradients: KeyValue) -> None:
        for gradient, returned in zip(gradients, payload_grad, strict=True):
            gradient.add_(returned)

    def keys(self, payload: Payload) -> KeyValue:
        key, value = payload
        return key, value

    def keys_with_pull(self, payload: Payload) -> tuple[KeyValue, Pull]:
        return self.keys(payload), lambda gradients: (gradients, ())


KEYS = KeysAndValues()
