"""An MLP: it works on every position alone, so segments run it as it is."""

from __future__ import annotations

from typing import Any

from megatron_prefix.layers.kind import Kind, Slot


class MLP(Kind):
    """Megatron's MLP."""

    name, symbol, slot = "MLP", "-", Slot.MLP

    def module_of(self, layer: Any) -> Any | None:
        """See Kind."""
        module = getattr(layer, "mlp", None)
        return None if type(module).__name__ == "IdentityOp" else module
