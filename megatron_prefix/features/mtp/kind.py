"""Numbers of the layer behind the decoder.  Pure."""

from __future__ import annotations

from typing import Any

from megatron_prefix.layers.kind import Kind, Slot


class NextToken(Kind):
    """What is around the inner layer of multi-token prediction, without the output layer."""

    name, symbol, slot = "multi-token prediction", "", Slot.MIXER

    def is_behind(self, config: Any) -> bool:
        """See Kind."""
        return bool(config.mtp_num_layers)

    def parameters(self, config: Any) -> int:
        """See Kind."""
        weights: int = 2 * config.hidden_size**2
        return weights

    def module_of(self, layer: Any) -> None:
        """See Kind: it fills no slot."""
