"""What the routers of a rank are given at the beginning of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_prefix.pipeline.executor import Stage
from megatron_prefix.pipeline.scoring import LossContract, set_auxiliary_scales
from megatron_prefix.pipeline.step import Step
from megatron_prefix.router.group_counts import GroupCounts
from megatron_prefix.router.ledger import RouterLedger
from megatron_prefix.router.tokens import LogicalTokens


def set_ledgers(
    stages: Sequence[Stage],
    step: Step,
    contract: LossContract,
    context_group: Any,
    device: torch.device,
) -> None:
    """Gives the stages the ledgers of their auxiliary losses, and Megatron the losses' scale.

    Args:
        stages: the rank's model chunks.
        step: their step, with gradients.
        contract: how losses are made.
        context_group: the context-parallel process group.
        device: where the model is.
    """
    if any(stage.hooks.routers for stage in stages):
        set_auxiliary_scales(contract, stages[-1].model, step.num_microbatches)
        tokens = LogicalTokens(
            step.forest, step.owner, device, context_group.rank(), context_group.size()
        )
        group_counts = GroupCounts()
        for stage in stages:
            stage.ledger = RouterLedger(tokens, stage.hooks.routers, group_counts)
