"""What the routers of a rank are given at the beginning of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_prefix.moe.group_counts import GroupCounts
from megatron_prefix.moe.ledger import RouterLedger
from megatron_prefix.moe.replay import Replay, SegmentRoutes, forward_action
from megatron_prefix.moe.tokens import LogicalTokens
from megatron_prefix.moe.versions import has_global_loss, replays_routes
from megatron_prefix.run.executor import Stage
from megatron_prefix.run.losses import LossContract, set_auxiliary_scales
from megatron_prefix.run.step import Builder, Step
from megatron_prefix.tree import Forest, Pairs


def builder(build: Builder, config: Any, forward_only: bool) -> Builder:
    """A builder of what routers ask for: ordered microbatches where they balance the global batch.

    Args:
        build: makes segments of rollouts.
        config: Megatron's, of the model.
        forward_only: see Megatron's schedules; then there are no losses of routers.
    """
    ordered = are_ordered(config, forward_only)

    def built(samples: Sequence[Pairs], microbatch_of: Sequence[int]) -> Forest:
        return replace(build(samples, microbatch_of), ordered=ordered)

    return built


def are_ordered(config: Any, forward_only: bool) -> bool:
    """Whether a microbatch's losses need all microbatches before it."""
    return has_global_loss(config) and not forward_only


def begin(
    stages: Sequence[Stage],
    step: Step,
    contract: LossContract,
    groups: ProcessGroupCollection,
    device: torch.device,
    forward_only: bool,
) -> None:
    """Gives the stages their routes and ledgers, and Megatron the scale of auxiliary losses.

    Args:
        stages: the rank's model chunks.
        step: their step.
        contract: how losses are made.
        groups: process groups.
        device: where the model is.
        forward_only: see Megatron's schedules.

    Raises:
        UserError: the trainer replays routes in a way that the schedule cannot follow.
    """
    _set_routes(stages, step, contract.config, groups, device)
    if not forward_only and any(stage.hooks.routers for stage in stages):
        set_auxiliary_scales(contract, stages[-1].model, step.num_microbatches)
        tokens = LogicalTokens(
            step.forest, step.microbatch_of, device, groups.cp.rank(), groups.cp.size()
        )
        group_counts = GroupCounts()
        for stage in stages:
            stage.ledger = RouterLedger(tokens, stage.hooks.routers, group_counts)


def _set_routes(
    stages: Sequence[Stage], step: Step, config: Any, groups: Any, device: torch.device
) -> None:
    routed = step.routed and replays_routes(config)
    actions = [forward_action(stage.hooks.routers.values(), routed) for stage in stages]
    routes = None
    if routed:  # on all stages, whether they have routers or not
        shape = config.num_layers, config.moe_router_topk
        routes = SegmentRoutes(step.forest, step.samples, shape, groups, device)
    for stage, action in zip(stages, actions, strict=True):
        stage.hooks.replay = Replay(routes, action) if routes is not None and action else None
