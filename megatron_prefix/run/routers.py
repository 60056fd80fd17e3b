"""What the routers of a rank are given at the beginning of a step."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_prefix.errors import refused
from megatron_prefix.moe import versions
from megatron_prefix.moe.group_counts import GroupCounts
from megatron_prefix.moe.ledger import RouterLedger
from megatron_prefix.moe.replay import Replay, SegmentRoutes, followers, forward_action
from megatron_prefix.moe.tokens import LogicalTokens
from megatron_prefix.refusals.table import AHEAD_ROUTES
from megatron_prefix.run.executor import Stage
from megatron_prefix.run.losses import LossContract, set_auxiliary_scales
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.step import Step


def check(step: Step, rank: Rank) -> None:
    """Refuses routers that replay in a way that segments cannot follow, before any of them runs.

    Raises:
        CannotShare: they record routes, or follow routes that the schedule has not been given.
    """
    for model in rank.language_models if rank.has_experts else ():
        found = versions.routers(model)
        forward_action(found.values(), _routed(step, rank))
        ahead = [one for layer, one in found.items() if layer >= len(model.decoder.layers)]
        if followers(ahead):
            raise refused(AHEAD_ROUTES)


def begin(
    stages: Sequence[Stage],
    step: Step,
    contract: LossContract,
    rank: Rank,
    forward_only: bool,
) -> None:
    """Gives the stages their routes and ledgers, and Megatron the scale of auxiliary losses.

    Args:
        stages: the rank's model chunks.
        step: their step.
        contract: how losses are made.
        rank: that holds them.
        forward_only: see Megatron's schedules.

    Raises:
        UserError: the trainer replays routes in a way that the schedule cannot follow.
    """
    _set_routes(stages, step, rank)
    if not forward_only and any(stage.hooks.routers for stage in stages):
        set_auxiliary_scales(contract, stages[-1].model, step.num_microbatches)
        cp = rank.groups.cp
        tokens = LogicalTokens(
            step.forest, step.microbatch_of, rank.device, cp.rank(), cp.size(),
            step.packed,
        )  # fmt: skip
        group_counts = GroupCounts()
        crossing = [one.segment for one in step.forest.exchanges]
        for stage in stages:
            stage.ledger = RouterLedger(tokens, stage.hooks.routers, group_counts, crossing)


def _routed(step: Step, rank: Rank) -> bool:
    return step.routed and versions.replays_routes(rank.config)


def _set_routes(stages: Sequence[Stage], step: Step, rank: Rank) -> None:
    config, routed = rank.config, _routed(step, rank)
    actions = [forward_action(stage.hooks.routers.values(), routed) for stage in stages]
    routes = None
    if routed:  # on all stages, whether they have routers or not
        shape = config.num_layers, config.moe_router_topk
        routes = SegmentRoutes(step.forest, step.samples, shape, rank.groups, rank.device)
    for stage, action in zip(stages, actions, strict=True):
        stage.hooks.replay = None
        if routes is not None and action:
            stage.hooks.replay = Replay(routes, action, followers(stage.hooks.routers.values()))
