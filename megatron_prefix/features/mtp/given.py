"""Tokens that calls give beside rows of embeddings.

A vision-language model embeds images and text itself, and hands its language model the tokens as
well: layers of multi-token prediction embed those further on by the language model's own table, the
placeholders of images among them. The tree is built of numbers that stand for rows
(features/vision/chunk_rows.py), so what the layers read is kept here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_prefix.device.transfer import to_device, to_host
from megatron_prefix.errors import refused
from megatron_prefix.refusals.table import AHEAD_GIVEN
from megatron_prefix.run.calls import EMBEDDINGS, ModelCall, shape_of
from megatron_prefix.run.rank import Rank, gathered
from megatron_prefix.tree import Pairs, cp_layout

Numbers = NDArray[np.int64]


def beside_embeddings(calls: Sequence[ModelCall], sequence_ranks: int) -> Numbers | None:
    """Tokens of calls that have embeddings, on this rank, one call's behind the other's; None where
    calls have none.

    Raises:
        CannotShare: a call has no tokens, or has them in another layout.
    """
    if not calls or calls[0][EMBEDDINGS] is None:
        return None
    columns = []
    for call in calls:
        tokens = call["input_ids"]
        if tokens is None or tokens.is_nested or tokens.shape != shape_of(call, sequence_ranks):
            raise refused(AHEAD_GIVEN)
        columns.append(tokens.reshape(-1))
    return to_host(torch.cat(columns)).astype(np.int64)


def whole_tokens(tokens: Numbers, lengths: Sequence[int], rank: Rank) -> Numbers:
    """Tokens of whole samples, one behind the other; all context-parallel ranks call this.

    Args:
        tokens: of this rank's positions.
        lengths: positions of every sample.
    """
    cp = rank.groups.cp
    if cp.size() == 1:
        return tokens
    order = cp_layout.view_order(lengths, cp.size())
    return to_host(gathered(to_device(rank.device, tokens), cp))[order]


def with_tokens(samples: Sequence[Pairs], tokens: Numbers, *, labelled: bool) -> list[Pairs]:
    """Samples with tokens in the place of what stood for them.

    Args:
        tokens: see `whole_tokens`.
        labelled: calls have labels; else each token is the label of the one before, and the last
            position's has no weight.
    """
    bounds = np.cumsum([len(sample) for sample in samples])[:-1]
    parts = np.split(tokens, bounds)
    return [
        replace(sample, inputs=ids, labels=sample.labels if labelled else np.append(ids[1:], 0))
        for sample, ids in zip(samples, parts, strict=True)
    ]
