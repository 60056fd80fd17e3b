"""What multi-token prediction of the last stage is given at the beginning of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

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


def begin(step: Step, rank: Rank, *, has_labels: bool) -> mtp.StepAhead:
    """What the layer reads in a step, on the last stage.

    Args:
        step: the step.
        rank: this one.
        has_labels: whether the step's calls have labels.
    """
    samples = step.samples
    if samples is None:
        raise RuntimeError("the last stage has no samples")
    logs = rank.language_models[-1].training
    if not has_labels and mtp.without_labels() is mtp.WithoutLabels.NO_LOSS:
        samples = [replace(one, weights=np.zeros(len(one))) for one in samples]
        logs = False
    cp, tp, ranks = rank.groups.cp, rank.groups.tp, rank.sequence_ranks
    tables = AheadTables(
        step.forest, samples, step.microbatch_of, mtp.division(rank.config), cp.rank(),
        cp.size(),
    )  # fmt: skip
    place = tp.rank() if ranks > 1 else 0
    return mtp.StepAhead(
        tables, rank.device, ranks, place, rank.config.mtp_num_layers if logs else 0
    )
