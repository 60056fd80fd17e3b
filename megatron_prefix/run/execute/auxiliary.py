"""The scales of auxiliary losses, of routers and multi-token prediction.

Megatron keeps one scale for the losses of routers and one for those of multi-token prediction.
`forward_step_calc_loss` sets them for each microbatch, by the trainer's functions, and a backward
reads what is there. A segment stands for several microbatches, so each one's numbers are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor

from megatron_prefix.run.rank import Rank

if TYPE_CHECKING:
    from megatron_prefix.run.execute.losses import LossContract


class AuxiliaryScales:
    """The scales that the stock schedule's backwards read on a pipeline stage, by microbatch.

    Stock's backward of a microbatch reads what was set last: on a stage with `ahead` stages behind
    it, in its forward of the microbatch that comes so many later, or of the last one. (Which that
    is with virtual stages is not known here.)

    Attributes:
        routers: float64 [microbatches], once all of them are noted.
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
        is_last = microbatch == self._num - 1
        first, end = max(microbatch - self._ahead, 0), microbatch - self._ahead + 1
        for scales, scaler in self._kept:
            scales[first : self._num if is_last else max(end, first)] = (
                scaler.main_loss_backward_scale  # type: ignore[attr-defined]
            )


def set_auxiliary_scales(contract: LossContract, model: Any, num_microbatches: int) -> None:
    """Tells Megatron how to weigh the losses of routers and of multi-token prediction, as a stage
    without losses does in its schedule for each microbatch.

    The scales are read when a backward runs, on every stage, and only the last has `Losses`.
    """
    config = contract.config
    if config.timers is not None:
        config.timers("forward-compute", log_level=2).start()
    forward_step_calc_loss(
        model, next(model.parameters()), None, config, getattr(model, "vp_stage", None),
        contract.collect_non_loss_data, max(num_microbatches, 1), [], contract.cp_size, False,
    )  # fmt: skip
