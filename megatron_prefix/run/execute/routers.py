"""The ledgers of a step, in which routers count."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_prefix.moe.group_counts import GroupCounts
from megatron_prefix.moe.ledger import RouterLedger
from megatron_prefix.moe.tokens import LogicalTokens
from megatron_prefix.run.execute.executor import Stage
from megatron_prefix.run.execute.losses import LossContract
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.read.step import Step


def begin(
    stages: Sequence[Stage], step: Step, contract: LossContract, rank: Rank
) -> GroupCounts | None:
    """Gives the stages their ledgers.

    Args:
        stages: the rank's model chunks.
        step: their step.
        contract: how losses are made.
        rank: that holds them.

    Returns:
        What sums counts over data-parallel ranks, if the loss of a router needs that.
    """
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
