"""What attention leaves for the children of a span, and how they get keys and values of it.

Most layers leave K and V themselves (`KeysAndValues`). Multi-latent attention leaves less, from
which children compute them (latent.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from megatron_prefix.sidecar.arena import Both, Payload

Pull = Callable[[Both], tuple[Payload, Sequence[Tensor | None]]]
"""Of gradients of keys and values: those of the payload, and of the layer's `weights`."""


class Leaving(Protocol):
    """What one layer leaves."""

    def left(self, key: Tensor, value: Tensor) -> Payload:
        """The payload of a segment with these K and V, [positions, kv_heads, dim] each."""

    def returned(self, sent: Payload, gradients: Both) -> None:
        """Adds what descendants have sent to the gradients of a segment's own K and V."""


class Shared(Leaving, Protocol):
    """What one layer leaves, and keys of levels that are made of it.

    Attributes:
        is_keys: whether that are K and V, so that attention reads its own ones in the sidecar.
        weights: that make keys and values of it, and are trained.
    """

    @property
    def is_keys(self) -> bool: ...  # noqa: D102

    @property
    def weights(self) -> Sequence[Tensor]: ...  # noqa: D102

    def keys(self, payload: Payload) -> Both:
        """K and V of ancestors, [rows, kv_heads, dim] each."""

    def keys_with_pull(self, payload: Payload) -> tuple[Both, Pull]:
        """The same, and what takes their gradients back; it is called once."""


class KeysAndValues:
    """K and V are what is shared; see Shared."""

    is_keys, weights = True, ()

    def left(self, key: Tensor, value: Tensor) -> Payload:
        """See Shared."""
        return key, value

    def keys(self, payload: Payload) -> Both:
        """See Shared."""
        key, value = payload
        return key, value

    def keys_with_pull(self, payload: Payload) -> tuple[Both, Pull]:
        """See Shared."""
        return self.keys(payload), lambda gradients: (gradients, ())

    def returned(self, sent: Payload, gradients: Both) -> None:
        """See Shared."""
        for gradient, more in zip(gradients, sent, strict=True):
            gradient.add_(more)


KEYS = KeysAndValues()
