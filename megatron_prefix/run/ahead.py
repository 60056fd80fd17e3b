"""What multi-token prediction of the last stage is given at the beginning of a step."""

from __future__ import annotations

from megatron_prefix.errors import refused
from megatron_prefix.layers import mtp
from megatron_prefix.refusals.table import AHEAD_NOTHING
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.step import Step
from megatron_prefix.tree.ahead import AheadTables, sums


def check(step: Step, rank: Rank) -> None:
    """Refuses a step whose gradients Megatron divides by zero.

    Raises:
        CannotShare: a microbatch has no weight on this rank.
    """
    samples, cp = step.samples, rank.groups.cp
    if samples is None or not (rank.is_last and samples and samples[0].weights is not None):
        return
    division = mtp.division(rank.config)
    if division.per_token or division.clamps:
        return
    left, _ = sums(samples, step.microbatch_of, cp.size())
    if (left[:, cp.rank()] == 0).any():
        raise refused(AHEAD_NOTHING)


def begin(step: Step, rank: Rank) -> mtp.StepAhead:
    """What the layer reads in a step, on the last stage."""
    if step.samples is None:
        raise RuntimeError("the last stage has no samples")
    cp, tp = rank.groups.cp, rank.groups.tp
    tables = AheadTables(
        step.forest, step.samples, step.microbatch_of, mtp.division(rank.config), cp.rank(),
        cp.size(),
    )  # fmt: skip
    ranks = rank.sequence_ranks
    return mtp.StepAhead(tables, rank.device, ranks, tp.rank() if ranks > 1 else 0, rank.config)
