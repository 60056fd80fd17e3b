"""What the routers of a rank are given at the beginning of a step."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_prefix.errors import refused
from megatron_prefix.moe.group_counts import GroupCounts
from megatron_prefix.moe.ledger import RouterLedger
from megatron_prefix.moe.replay import Replay, SegmentRoutes
from megatron_prefix.moe.tokens import LogicalTokens
from megatron_prefix.moe.told import RECORD, replays_of
from megatron_prefix.refusals.table import AHEAD_ROUTES, RECORDS_ROUTES, UNKNOWN_ROUTES
from megatron_prefix.run.execute.executor import Stage
from megatron_prefix.run.execute.losses import LossContract
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.read.routes import told_of
from megatron_prefix.run.read.step import Step
from megatron_prefix.run.read.suspend import Capture


def check(step: Step, rank: Rank, capture: Capture) -> None:
    """Refuses routers that replay in a way that segments cannot follow, before any of them runs.

    Raises:
        CannotShare: they record routes, or follow routes that the schedule has not been given.
    """
    for chunk, model in enumerate(rank.language_models):
        for layer, (_, (told, *_)) in told_of(capture, chunk).items():
            if told.action == RECORD:
                raise refused(RECORDS_ROUTES)
            if not step.routed:
                raise refused(UNKNOWN_ROUTES, told.action)
            if layer >= len(model.decoder.layers):
                raise refused(AHEAD_ROUTES)


def begin(
    stages: Sequence[Stage],
    step: Step,
    contract: LossContract,
    rank: Rank,
    capture: Capture,
) -> GroupCounts | None:
    """Gives the stages their routes and ledgers.

    Returns:
        What sums counts over data-parallel ranks, if the loss of a router needs that.

    Args:
        stages: the rank's model chunks.
        step: their step.
        contract: how losses are made.
        rank: that holds them.
        capture: knows what routers have been told.

    Raises:
        UserError: routes of another model.
    """
    _set_routes(stages, step, rank, capture)
    if not rank.forward_only and any(stage.hooks.routers for stage in stages):
        cp = rank.groups.cp
        tokens = LogicalTokens(
            step.forest, step.microbatch_of, rank.device, cp.rank(), cp.size(),
            step.packed,
        )  # fmt: skip
        group_counts = GroupCounts()
        crossing = [one.segment for one in step.forest.exchanges]
        scales = None if contract.scales is None else contract.scales.routers
        for stage in stages:
            stage.ledger = RouterLedger(tokens, stage.hooks.routers, group_counts, crossing, scales)
        return group_counts if rank.ordered else None
    return None


def leave(num_microbatches: int, rank: Rank, capture: Capture) -> None:
    """Leaves routers that were told to follow routes as the stock schedule does after a step."""
    for chunk in range(len(rank.models)):
        for router, _ in told_of(capture, chunk).values():
            if (replays := replays_of(router)) is not None:
                replays.passed(num_microbatches, backward=not rank.forward_only)


def _set_routes(stages: Sequence[Stage], step: Step, rank: Rank, capture: Capture) -> None:
    config, routes = rank.config, None
    if step.routed:  # on all stages, whether they have routers or not
        shape = config.num_layers, config.moe_router_topk
        routes = SegmentRoutes(step.forest, step.samples, shape, rank.groups, rank.device)
    for chunk, stage in enumerate(stages):
        told = {
            router: one._replace(has_mask=any(other.has_mask for other in each))
            for router, each in told_of(capture, chunk).values()
            for one in each[:1]
        }
        stage.hooks.replay = Replay(routes, told) if routes is not None and told else None
