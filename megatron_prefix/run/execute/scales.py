"""Scales of auxiliary losses that differ by microbatch.

Megatron keeps one number for the losses of routers and one for those of multi-token prediction.
`forward_step_calc_loss` sets them for each microbatch, by the trainer's functions, and a backward
reads what is there. A segment stands for several microbatches, so each one's numbers are kept.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor

from megatron_prefix.run.rank import Rank


class AuxiliaryScales:
    """The scales that the stock schedule's backwards read on a pipeline stage, by microbatch.

    Stock's backward of a microbatch reads what was set last: on a stage with `ahead` stages behind
    it, in its forward of the microbatch that comes so many later, or of the last one. (Which that
    is with virtual stages is not known here.)

    Args:
        num_microbatches: of the trainer on this rank.
        rank: this one.

    Attributes:
        routers: float64 [microbatches], once all of them are noted.
        further: likewise, of multi-token prediction.
    """

    def __init__(self, num_microbatches: int, rank: Rank) -> None:
        self._num, self._ahead = num_microbatches, rank.num_stages - 1 - rank.stage
        self.routers, self.further = torch.ones(
            (2, num_microbatches), dtype=torch.float64, device=rank.device
        )
        config = rank.config
        self._kept: list[tuple[Tensor, type]] = []
        if config.num_moe_experts is not None:
            self._kept.append((self.routers, MoEAuxLossAutoScaler))
        if getattr(config, "mtp_num_layers", None) is not None:
            self._kept.append((self.further, MTPLossAutoScaler))

    def note(self, microbatch: int) -> None:
        """Keeps what Megatron has set for a microbatch."""
        is_last = microbatch == self._num - 1
        first, end = max(microbatch - self._ahead, 0), microbatch - self._ahead + 1
        for scales, scaler in self._kept:
            scales[first : self._num if is_last else max(end, first)] = (
                scaler.main_loss_backward_scale  # type: ignore[attr-defined]
            )
