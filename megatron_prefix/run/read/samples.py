"""Trained positions of model calls that have no loss_mask, from the microbatches themselves.

Some trainers keep the mask for their loss in what the forward step draws from its data iterator;
where it is, megatron_prefix/trainers/table.py says.  It is used only where the tokens there
are those of the model call, position by position: else, and in passes without gradients, all
positions count.  A loss that looks at others is an error at the step's end (`Losses.check`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.run.calls import CallLayout, ModelCall, Samples

logger = logging.getLogger(__name__)


def trained_positions(
    calls: Sequence[ModelCall],
    layouts: Sequence[CallLayout],
    samples: Samples,
    rank: int,
    size: int,
) -> list[Tensor | None]:
    """Which positions of each call carry loss, bool like its input_ids; None for all of them where
    one is not known.  The host waits for the device.

    Args:
        calls: of one model chunk, with what was drawn for them.
        layouts: of the calls.
        samples: the trainer's.
        rank: place among the ranks of context parallelism.
        size: their number.
    """
    pairs = zip(calls, layouts, strict=True)
    masks = [_of_call(call, layout, samples, rank, size) for call, layout in pairs]
    if all(one is not None for one in masks):
        return masks
    logger.debug("masks of the microbatches do not fit the model calls: all positions count")
    return [None] * len(masks)


def _of_call(
    call: ModelCall, layout: CallLayout, samples: Samples, rank: int, size: int
) -> Tensor | None:
    tokens, whole = call["input_ids"], layout.lengths
    given = None if call.drawn is None else samples(call.drawn)
    if given is None or tokens is None or tokens.is_nested or len(given) > len(whole):
        return None
    ids, flags, known = tokens.new_zeros(3, sum(whole))
    starts = np.cumsum([0, *whole]).tolist()
    for (one, trained), start, room in zip(given, starts, whole, strict=False):
        if one.dim() != 1 or trained.shape != one.shape or len(one) > room:
            return None
        held = slice(start, start + len(one))
        ids[held], flags[held], known[held] = one, trained, 1
    mine = torch.from_numpy(layout.held(rank, size)).to(tokens.device)
    same = (tokens.reshape(-1) == ids[mine]) | (known[mine] == 0)
    return (flags[mine] != 0).view_as(tokens) if bool(same.all()) else None
