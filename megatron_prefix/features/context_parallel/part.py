"""Context parallelism as a part of the step: where K and V of whole positions are, and which
positions of a call a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_prefix.features.context_parallel.gathered import GatheredArena
from megatron_prefix.features.context_parallel.sharded import ShardedArena
from megatron_prefix.features.context_parallel.slices import check_positions, check_slices
from megatron_prefix.parts import StepPart
from megatron_prefix.sidecar.arena import Arena, DeviceBytes
from megatron_prefix.tree.payload_map import Form, PayloadMap, RowMap

if TYPE_CHECKING:
    from megatron_prefix.run.read.read_calls import CallTokens
    from megatron_prefix.run.read.suspend import Capture
    from megatron_prefix.sidecar.row_exchange import RowExchange


class ContextParallel(StepPart):
    """Exchanges rows of positions. Arguments: see StepPart."""

    def read(self, capture: Capture) -> None:
        """See StepPart."""
        check_slices(capture, self.rank, self.callbacks.slices)

    def read_last(self, capture: Capture, last: CallTokens | None) -> None:
        """See StepPart."""
        if last is not None and self.rank.is_first:
            check_positions(last, self.rank.groups.cp)

    def arenas(
        self, planned: PayloadMap, forms: Sequence[Form], exchange: RowExchange | None
    ) -> ExchangedLayers | None:
        """See StepPart."""
        return None if exchange is None else ExchangedLayers(planned, forms, exchange)


class ExchangedLayers:
    """Layers of which ranks exchange all positions; of last ones every rank has a copy.

    Args:
        planned: says whether each rank keeps all of them (cp_reduce "segment") or its own.
    """

    def __init__(self, planned: PayloadMap, forms: Sequence[Form], exchange: RowExchange) -> None:
        self._planned, self._exchange = planned, exchange
        self._layers = {layer for layer, form in enumerate(forms) if form == Form.POSITIONS}

    def __contains__(self, layer: int) -> bool:
        return layer in self._layers

    def near(self, layer: int, backward: bool) -> int:
        return layer

    def arena(self, layer: int, rows: RowMap, device_bytes: DeviceBytes) -> Arena:
        keeps_all = self._planned.shares < self._planned.parts
        store = GatheredArena if keeps_all else ShardedArena
        return store(self._exchange, rows, device_bytes, self._planned.lengths)

    def clear(self) -> None:
        """Nothing is kept from step to step."""
