"""The losses that layers have logged in a step, and the biases of routers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

from megatron_prefix.features.experts.ledger import LOGGED_AS
from megatron_prefix.features.experts.routers import routers as routers_in
from megatron_prefix.megatron.logged_losses import logged_losses


def take_auxiliary(models: Sequence[Any]) -> dict[str, Tensor]:
    """Returns logged auxiliary losses and experts' biases; clears the logs.

    Args:
        models: the rank's language models, without wrappers.

    Returns:
        By name, float32 on the CPU: losses [layers of the whole model], summed over microbatches
        and over the ranks that share them; biases [experts]; that of multi-token prediction [its
        layers], summed over microbatches, the mean over ranks.  Empty without any of them.
    """
    routers, logged = list(_routers(models)), _ahead()
    if not routers:
        return logged
    group = routers[0][1].tp_cp_group
    for name, values in logged_losses().items():
        total = values.clone()
        values.zero_()
        whole = routers[0][1].tp_dp_cp_group if name == LOGGED_AS["global_aux_loss"] else group
        if whole.size() > 1:
            dist.all_reduce(total, group=whole)
        # Every rank logs a mean of the z-loss, but its part of a sum of the others.
        logged[name] = total / group.size() if name == "z_loss" else total
    for number, router in routers:
        if router.enable_expert_bias:
            logged[f"layer {number}: expert_bias"] = router.expert_bias.detach().clone()
    return {name: value.to("cpu", torch.float32) for name, value in logged.items()}


def _ahead() -> dict[str, Tensor]:
    """What multi-token prediction has logged."""
    tracker = MTPLossLoggingHelper.tracker
    values = tracker.get("values", tracker.get("loss_values"))  # the latter since 0.19
    if values is None:
        return {}
    total, group = (
        values.clone(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    values.zero_()
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return {"mtp_loss": (total / group.size()).to("cpu", torch.float32)}


def _routers(models: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """(number of the layer in the whole model, from 1; router)."""
    for model in models:
        for router in routers_in(model).values():
            yield router.layer_number, router
