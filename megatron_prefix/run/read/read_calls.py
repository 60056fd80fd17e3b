"""What a step's model calls say on this rank: tokens, labels and loss flags, on the host.

The first stage's calls have the tokens, the last stage's the labels and the loss mask, and those in
the middle may have nothing.  With context parallelism every rank's call has its own slice of each
sample (its chunks of the zig-zag, as get_batch_on_this_cp_rank of megatron/core/utils.py makes
them).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_prefix.device.transfer import to_host
from megatron_prefix.errors import refused
from megatron_prefix.layers.table import payload_parts
from megatron_prefix.megatron import features
from megatron_prefix.megatron.install import installed
from megatron_prefix.parts import StepPart
from megatron_prefix.refusals.table import (
    COLUMN_LENGTH,
    NO_POSITION_IDS,
    NO_TOKENS,
    OTHER_POSITIONS,
)
from megatron_prefix.run import calls as model_calls
from megatron_prefix.run.calls import (
    EMBEDDINGS,
    Callbacks,
    CallLayout,
    ModelCall,
    Samples,
    check_masks,
    layouts,
)
from megatron_prefix.run.read import heads
from megatron_prefix.run.read.suspend import Capture
from megatron_prefix.run.request import Request

Numbers = NDArray[np.int64]
logger = logging.getLogger(__name__)


class CallTokens(NamedTuple):
    """What the calls of one model chunk say of their positions on this rank.

    Attributes:
        tokens: int64 [positions] of all calls one behind the other; None if none are given.
        trained: whether a position carries loss, 0 or 1, likewise.
        positions: `position_ids`, likewise; looked at only to refuse some.
        weights: of the labels in the loss of multi-token prediction, the bits of their loss_mask in
            float64, likewise; None without.
    """

    layouts: list[CallLayout]
    tokens: Numbers | None
    labels: Numbers | None
    trained: Numbers | None
    positions: Numbers | None
    weights: Numbers | None = None

    @property
    def lengths(self) -> list[int]:
        return [length for layout in self.layouts for length in layout.lengths]


class ReadCalls(NamedTuple):
    """What this rank's model calls say of a step.

    Attributes:
        last: of the last stage's calls, on that stage, where they are not the first's.
        up_to_loss: whether what is behind a sample's last loss has no effect: some routers count
            all tokens, and multi-token prediction has losses of its own.
        num_next: inputs behind a position that multi-token prediction reads with it.
    """

    first: CallTokens | None
    last: CallTokens | None
    parts: Sequence[StepPart] = ()
    up_to_loss: bool = False
    num_next: int = 0


def read_calls(capture: Capture, request: Request) -> ReadCalls:
    """Reads the model calls that forward steps are suspended in; the host waits for the device.

    Raises:
        CannotShare: the model or its calls cannot be run in segments.
    """
    rank, callbacks = request.rank, request.callbacks
    for chunk in range(len(rank.models)):
        _check_chunk(capture, request, chunk)
    capture.check_settings()
    for part in request.parts:
        part.read(capture)
    first = last = None
    cp = rank.groups.cp
    read = functools.partial(
        read_tokens, cp_size=cp.size(), callbacks=callbacks, forward_only=rank.forward_only,
        cp_rank=cp.rank(), sequence_ranks=rank.model.sequence_ranks,
        ahead=rank.predicts_further,
    )  # fmt: skip
    if rank.is_first:
        calls = capture.calls(0)
        first = read(calls)
        if first is None or (first.tokens is None and calls[0][EMBEDDINGS] is None):
            raise refused(NO_TOKENS)
        if getattr(rank.language_models[0], "position_embedding_type", "") == "learned_absolute":
            check_positions(first, cp.rank(), cp.size())
    if rank.is_last and not (rank.is_first and len(rank.models) == 1):
        calls = capture.calls(-1)
        last = read(calls) if rank.model.looks_ahead or _tell_loss(calls, callbacks) else None
    for part in request.parts:
        part.read_last(capture, first if last is None else last)
    up_to_loss = not (rank.forward_only or rank.model.counts_tokens or rank.model.looks_ahead)
    return ReadCalls(first, last, request.parts, up_to_loss, rank.model.looks_ahead)


def _check_chunk(capture: Capture, request: Request, chunk: int) -> None:
    """Refuses what segments of one model chunk cannot be.

    Modules are looked at until a chunk has hooks; options in every step, since Megatron reads some
    of them in every forward, and windows of attention.
    """
    rank, calls = request.rank, capture.calls(chunk)
    model, wrapped = rank.language_models[chunk], rank.models[chunk]
    hooks = installed(wrapped)
    if hooks is not None and not hooks.is_current():
        hooks.uninstall()
        hooks = None
    if hooks is not None:
        features.check_again(model, wrapped, hooks.parts, rank.model)
        use = hooks.mask_use
    else:
        features.check(model, wrapped)
        use = features.mask_use(payload_parts(model))
    for part in request.parts:
        part.check_model(chunk)
    model_calls.check(calls)
    facts = rank.model
    check_masks(calls, use, counts_tokens=facts.counts_tokens, sequence_ranks=facts.sequence_ranks)
    if facts.looks_ahead:
        heads.check(calls)


def _tell_loss(calls: Sequence[ModelCall], callbacks: Callbacks) -> bool:
    """Whether the last stage's calls say labels, or which positions carry loss. Else there is
    nothing to read: its tokens may be any (SkyRL: those of another layout)."""
    if callbacks.trained is not None or callbacks.samples is not None:
        return True
    names = ("labels",) if callbacks.masks_tokens else ("labels", "loss_mask")
    return any(call[name] is not None for call in calls for name in names)


def read_tokens(
    calls: Sequence[ModelCall],
    cp_size: int,
    callbacks: Callbacks,
    *,
    forward_only: bool = False,
    cp_rank: int = 0,
    sequence_ranks: int = 1,
    ahead: bool = False,
) -> CallTokens | None:
    """Tokens, labels and loss flags of a chunk's calls, on the host; None if they say nothing.

    Without gradients nothing tells whether somebody looks at a position that the calls' loss_mask
    leaves out, so only the callback may leave out any.

    Raises:
        CannotShare: see `calls.layouts`; a column of another size.
    """
    if not calls:  # a data-parallel rank without microbatches
        nothing = np.zeros(0, np.int64)
        return CallTokens([], nothing, nothing, nothing, None, nothing if ahead else None)
    where = layouts(calls, cp_size, sequence_ranks, callbacks.slices)
    if where is None:
        return None
    for call in calls:
        call.check_unchanged()
    followed = not (forward_only or callbacks.masks_tokens)
    trained = [call["loss_mask"] if followed else None for call in calls]
    if all(mask is None for mask in trained):
        if callbacks.trained is not None:
            trained = [callbacks.trained(call) for call in calls]
        elif callbacks.samples is not None and not forward_only:
            trained = trained_positions(calls, where, callbacks.samples, cp_rank, cp_size)
    # Tokens that come with embeddings may be in another layout.
    embedded = any(call[EMBEDDINGS] is not None for call in calls)
    columns = {"input_ids": [None if embedded else call["input_ids"] for call in calls]}
    moves = bool(calls[0].others) and heads.moves_labels(calls[0].arguments)
    columns["labels"] = [heads.moved(call) if moves else call["labels"] for call in calls]
    columns["trained positions"] = [None if mask is None else mask != 0 for mask in trained]
    columns |= {"loss_mask": [*map(_loss_weights, calls)]} if ahead else {}
    lengths = [sum(layout.lengths) // cp_size for layout in where]
    for name, column in columns.items():
        for value, num in zip(column, lengths, strict=True):
            if value is not None and not value.is_nested and value.numel() != num:
                raise refused(COLUMN_LENGTH, name, value.numel(), num)
    positions = [_counted(call["position_ids"], cp_size) for call in calls]
    tokens, labels, flags, *weights = columns.values()
    return CallTokens(where, *_to_host([tokens, labels, flags, positions, *weights], lengths))


def trained_positions(
    calls: Sequence[ModelCall],
    layouts: Sequence[CallLayout],
    samples: Samples,
    rank: int,
    size: int,
) -> list[Tensor | None]:
    """Which of a rank's positions of each call carry loss, bool [positions of all samples]; None
    for all of them where one is not known.  The host waits for the device.

    Some trainers keep the mask for their loss in what the forward step draws from its data
    iterator; where it is, megatron_prefix/trainers/table.py says.  It is used only where the tokens
    there are those of the model call, if it has any, position by position: else, and in passes
    without gradients, all positions count.  A loss that looks at others is an error at the step's
    end (`Losses.problem`).
    """
    pairs = zip(calls, layouts, strict=True)
    masks = [_trained_in(call, layout, samples, rank, size) for call, layout in pairs]
    if all(mask is not None for mask in masks):
        return masks
    logger.debug("masks of the microbatches do not fit the model calls: all positions count")
    return [None] * len(masks)


def _trained_in(
    call: ModelCall, layout: CallLayout, samples: Samples, rank: int, size: int
) -> Tensor | None:
    tokens, lengths = call["input_ids"], layout.lengths
    pairs = None if call.drawn is None else samples(call.drawn)
    is_nested = tokens is not None and tokens.is_nested
    if not pairs or is_nested or len(pairs) > len(lengths):
        return None
    like = pairs[0][0] if tokens is None else tokens  # what was drawn may be on another device
    ids, flags, is_known = like.new_zeros(3, sum(lengths))
    starts = np.cumsum([0, *lengths]).tolist()
    for (own, trained), start, room in zip(pairs, starts, lengths, strict=False):
        if own.dim() != 1 or trained.shape != own.shape or len(own) > room:
            return None
        places = slice(start, start + len(own))
        ids[places], flags[places], is_known[places] = own, trained, 1
    local = torch.from_numpy(layout.held(rank, size)).to(ids.device)
    if tokens is not None and not (ids[local] == tokens.reshape(-1))[is_known[local] != 0].all():
        return None
    return flags[local] != 0


def _counted(ids: Tensor | None, cp_size: int) -> Tensor | None:
    """Of position_ids with three rows (mrope) the first, where ranks look who holds what."""
    return ids[0] if cp_size > 1 and ids is not None and ids.dim() == 3 else ids


def _loss_weights(call: ModelCall) -> Tensor | None:
    mask, tokens = call["loss_mask"], call["input_ids"]
    if mask is None and tokens is not None and not tokens.is_nested:
        mask = torch.ones_like(tokens)
    if mask is None or mask.is_nested:
        return None
    return mask.double().contiguous().view(torch.int64)


def _to_host(
    columns: Sequence[Sequence[Tensor | None]], lengths: Sequence[int]
) -> list[Numbers | None]:
    """Every column as one array; all of them come in one copy, for which the host waits once."""
    usable = [
        all(v is not None and not v.is_nested and v.numel() == n for v, n in zip(c, lengths))  # noqa: B905
        for c in columns
    ]
    values = [v for column, use in zip(columns, usable, strict=True) if use for v in column]
    if not values:
        return [None] * len(columns)
    device = values[0].device  # type: ignore[union-attr]
    flat = [v.detach().reshape(-1).to(device, torch.int64) for v in values]  # type: ignore[union-attr]
    table = iter(to_host(torch.cat(flat)).reshape(sum(usable), -1))
    return [next(table) if use else None for use in usable]


def check_positions(tokens: CallTokens, rank: int, size: int) -> None:
    """Refuses position ids that the positions of segments do not have; a learned embedding looks at
    them, rotary positions do not.

    Raises:
        CannotShare: they count otherwise, or are not there.
    """
    if tokens.positions is None:
        raise refused(NO_POSITION_IDS)
    places = [layout.positions(rank, size) for layout in tokens.layouts]
    if not np.array_equal(tokens.positions, np.concatenate([np.arange(0), *places])):
        raise refused(OTHER_POSITIONS)
