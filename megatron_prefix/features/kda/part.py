"""Packs of a model with Kimi Delta Attention."""

from __future__ import annotations

from megatron_prefix.errors import refused
from megatron_prefix.features.mtp.part import leave_padding_out
from megatron_prefix.parts import StepPart
from megatron_prefix.refusals.table import KIMI_PADDED
from megatron_prefix.run.read.suspend import Capture


class KimiPacks(StepPart):
    """Refuses packs in which the stock schedule's states run on into the next sample."""

    def read(self, capture: Capture) -> None:
        """See StepPart: the layers take `cu_seqlens_q`, also where padding is not counted in it."""
        if leave_padding_out(capture.calls(0)):
            raise refused(KIMI_PADDED)
