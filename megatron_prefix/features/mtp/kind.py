"""Numbers of the layer behind the decoder.  Pure."""

from __future__ import annotations

from typing import Any

from megatron_prefix.layers.kind import Kind, Slot
from megatron_prefix.predict.execution import Execution
from megatron_prefix.predict.kinds import LayerMemory, saving
from megatron_prefix.predict.precision import less


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

    def memory(self, config: Any, form: Execution) -> LayerMemory:
        """Bytes it saves (predict/kinds.py), without one norm: two more, of which nobody
        saves the output, and what the projection is given, two rows wide."""
        hidden = config.hidden_size / form.sequence_ranks
        local = 0 if form.fused_layers else 2 * hidden + 2  # norms save what they have normed
        numbers = 3 * hidden + local
        saved = numbers * form.itemsize - less(2 * hidden, config, form)
        return saving(saved, numbers, config, form)

    def module_of(self, layer: Any) -> None:
        """See Kind: it fills no slot."""
