"""What multi-token prediction of the last stage is given at the beginning of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from megatron_prefix.errors import refused
from megatron_prefix.features.across.communicator import Communicator
from megatron_prefix.layers import mtp
from megatron_prefix.refusals.table import AHEAD_NOTHING
from megatron_prefix.run.execute.losses import LossContract, set_auxiliary_scales
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.read.step import Step
from megatron_prefix.tree import Forest
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


def begin(
    step: Step,
    rank: Rank,
    contract: LossContract,
    communicator: Communicator | None,
    *,
    has_labels: bool,
) -> mtp.StepAhead:
    """What the layer reads in a step, on the last stage.

    Args:
        step: the step.
        rank: this one.
        contract: how losses are made.
        communicator: of the data-parallel ranks that payloads cross, which all call this; or None.
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
        cp.size(), apart=contract.scales is not None,
    )  # fmt: skip
    if communicator is not None:
        scale = 1.0
        if not rank.forward_only:
            set_auxiliary_scales(contract, rank.models[-1], step.num_microbatches)
            scale = mtp.loss_scale()
        _tell_owners(tables, step.forest, communicator, scale)
    place = tp.rank() if ranks > 1 else 0
    return mtp.StepAhead(
        tables, rank.device, ranks, place, rank.config.mtp_num_layers if logs else 0,
        None if contract.scales is None else contract.scales.further,
    )  # fmt: skip


def _tell_owners(
    tables: AheadTables, forest: Forest, communicator: Communicator, scale: float
) -> None:
    """Ranks tell the owners of what they have in common which labels follow there, and what each
    weighs in their losses.

    Args:
        tables: of this rank.
        forest: its segments.
        communicator: of the ranks.
        scale: of this rank's loss; by its number of microbatches it can be another on each.
    """
    told: list[tuple[int, np.ndarray]] = []
    asked: list[tuple[int, int, tuple[int, ...]]] = []
    for one in forest.exchanges:
        for peer, spans in one.peers:
            if forest.segments[one.segment].source < 0:
                asked.append((peer, one.segment, spans))
                continue
            rows = tables.told(one.segment)
            rows[3] *= scale
            told.append((peer, rows))
    sizes = [(peer, np.array([rows.shape[1]])) for peer, rows in told]
    heard = communicator.numbers(sizes, [(peer, (1,), torch.int64) for peer, *_ in asked])
    wanted = [
        (peer, (6, int(size[0])), torch.float64)
        for (peer, *_), size in zip(asked, heard, strict=True)
    ]
    for (_, segment, spans), rows in zip(asked, communicator.numbers(told, wanted), strict=True):
        rows[3] /= scale
        tables.hear(segment, spans, rows)
