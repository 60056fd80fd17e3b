"""A trainer's model call: what it says of a microbatch, and where the call's positions are.

All trainers call the model alike, after their own broadcast over tensor-parallel ranks, their
packing and their slicing for context parallelism.  So the call, and not the data iterator, is where
microbatches are taken from.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import (
    _pytree as pytree,  # torch's own; torch.utils.pytree is not public before 2.9
)

from megatron_prefix import features
from megatron_prefix.errors import refused
from megatron_prefix.layers.attention import MaskUse
from megatron_prefix.refusals.table import (
    DIFFERENT_ARGUMENTS,
    EMPTY_ARGUMENT,
    INFERENCE_CONTEXT,
    INFERENCE_PARAMS,
    NO_MASK,
    NO_POSITION,
    NOT_CAUSAL,
    ODD_SLICES,
    OTHER_PACKING,
    OTHER_TENSORS,
    OVERWRITTEN,
    PADDING_MASK,
    SOME_HAVE,
)
from megatron_prefix.tree import cp_layout
from megatron_prefix.tree.cp_layout import Slices

PER_POSITION = ("input_ids", "position_ids", "labels", "loss_mask")
"""Arguments of the model that have a value for every position."""

EMBEDDINGS = "decoder_input"
"""Argument of the model instead of tokens: [positions, samples, hidden_size]."""
BLOCK = "extra_block_kwargs"
"""Keywords for the decoder, which may hold some that features take."""

FILLED_BY_MODEL = "output_processor_context"
"""Keyword for a dict that the model's head may fill: see read/heads.py."""

REFUSED = {"inference_context": INFERENCE_CONTEXT, "inference_params": INFERENCE_PARAMS}
"""Arguments of the model that cannot be given."""
MASKS = ("attention_mask", "padding_mask")
"""Arguments of the model that segments do not have: see `check_masks`."""


@dataclass(frozen=True)
class ModelCall:
    """What a forward step calls the model with; callbacks get it. `call[name]` is an argument.

    Attributes:
        microbatch: its number in the step, from 0.
        arguments: by name, as the model's `forward` names them; None and absent are the same.
            `input_ids`, `position_ids` and `labels` are int64, [samples, positions] of this rank.
        versions: of the tensors that are per position, as torch counts writes to them.
        drawn: what the forward step drew from its data iterator before, where that is kept.
    """

    microbatch: int
    arguments: Mapping[str, Any]
    versions: tuple[int, ...] = ()
    drawn: Any = None

    def check_unchanged(self) -> None:
        """Refuses tensors that were written after the call: a buffer for all microbatches.

        Raises:
            UserError: such a step can no longer be run at all.
        """
        if self.versions != versions_of(self.arguments):
            raise refused(OVERWRITTEN, "an argument of the model", self.microbatch)

    def without_tensors(self) -> ModelCall:
        packings = (*features.TAKEN, "packed_seq_params")
        plain = {
            name: True if isinstance(value, Tensor) or name in packings else value
            for name, value in self.arguments.items()
            if value is not None and name != BLOCK
        }
        return ModelCall(self.microbatch, plain | self.others)

    def keyword(self, name: str) -> Any:
        value = self[name]
        return (self[BLOCK] or {}).get(name) if value is None else value

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    @property
    def others(self) -> dict[str, Any]:
        """Arguments that are about no position and go along with every segment."""
        own = {*PER_POSITION, *features.TAKEN, *REFUSED, *MASKS, "packed_seq_params"}
        arguments = {n: v for n, v in self.arguments.items() if n not in own and v is not None}
        if isinstance(block := arguments.get(BLOCK), dict):
            arguments[BLOCK] = {
                name: value for name, value in block.items() if name not in features.TAKEN
            }
        # Keywords for something else: an empty dict is as good as none.
        return {n: v for n, v in arguments.items() if not (n.endswith("_kwargs") and v == {})}


Samples = Callable[[Any], Sequence[tuple[Tensor, Tensor]] | None]
"""(what was drawn) -> of every sample, in the order of the model call, its tokens, int [positions],
and which positions carry loss, bool [positions]: whole sequences, no padding. None: not known."""


@dataclass(frozen=True)
class Callbacks:
    """What a trainer may say of its microbatches that its model calls do not.

    Attributes:
        trained: (model call) -> bool or float, shaped like the call's input_ids on this rank: which
            positions carry loss (nonzero). Without it the call's loss_mask says so; without that,
            every position counts as trained.
        routes: (model call) -> int, the shape of input_ids and [layers, topk]: the experts of each
            token, where MoE routers replay routes and no forward step gives them. Asked on the
            first stage; `drawn` of the call is what its forward step drew from the data iterator.
        samples: (what was drawn) -> the trained positions of each sample (`Samples`). Used in steps
            with gradients whose calls have no loss_mask, where `trained` is not set.
        passes_together: data-parallel ranks make equally many calls without gradients, so prompts
            may cross ranks in these calls, too (`PrefixConfig.across_ranks`).
        slices: how calls are cut for context-parallel ranks; layers must be made for that.
        masks_tokens: the loss_mask of a call is over tokens, not over the positions that predict
            them (ROLL), or for multi-token prediction alone (verl, NeMo-RL). It is then ignored:
            every position counts as trained, or those that `samples` says.
        sums_gradients: the trainer sums gradients over data-parallel ranks after the schedule.
            Without it prompts cross ranks only for models in Megatron's DistributedDataParallel.
    """

    trained: Callable[[ModelCall], Tensor | None] | None = None
    routes: Callable[[ModelCall], Tensor | None] | None = None
    samples: Samples | None = None
    passes_together: bool = False
    slices: Slices = Slices.ZIGZAG
    masks_tokens: bool = False
    sums_gradients: bool = False

    def needs_drawn(self, forward_only: bool) -> bool:
        return self.routes is not None or (self.samples is not None and not forward_only)


def bound(
    signature: inspect.Signature, args: tuple, kwargs: dict[str, Any], microbatch: int
) -> ModelCall:
    """A call of a language model, its arguments by the names of the signature."""
    named = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(parameter.name, {}))
    return ModelCall(microbatch, named, versions_of(named))


def versions_of(arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """See `ModelCall.versions`."""
    tensors = [arguments.get(name) for name in (*PER_POSITION, *MASKS, *features.TAKEN)]
    packing = arguments.get("packed_seq_params")
    tensors += [getattr(packing, name, None) for name in ("cu_seqlens_q", "cu_seqlens_q_padded")]
    return tuple(
        t._version
        for t in tensors
        if isinstance(t, Tensor) and not (t.is_inference() or t.is_nested)
    )


class CallLayout(NamedTuple):
    """Where the positions of a microbatch's samples are.

    Attributes:
        lengths: positions of every sample on all context-parallel ranks, padding inside a pack
            included.
        packed: whether they are one behind the other in one row (THD), else one row each.
        behind: positions behind the last sample of a pack, the last of `lengths`; 0 if none are.
        slices: how its rows are cut for context-parallel ranks.
    """

    lengths: tuple[int, ...]
    packed: bool
    behind: int = 0
    slices: Slices = Slices.ZIGZAG

    def held(self, rank: int, size: int) -> cp_layout.Index:
        """Positions of the samples, one behind the other, that a context-parallel rank holds.

        Raises:
            CannotShare: they cannot be cut so.
        """
        if self.slices is Slices.CONTIGUOUS:
            rows = (sum(self.lengths),) if self.packed else self.lengths
            return cp_layout.contiguous_positions(rows, rank, size)
        for length in self.lengths if size > 1 else ():
            if length % (2 * size):
                raise refused(ODD_SLICES, length // size, 2 * size)
        return cp_layout.held_positions(self.lengths, rank, size)

    def positions(self, rank: int, size: int) -> cp_layout.Index:
        places = [np.arange(length) for length in self.lengths]
        return np.concatenate(places)[self.held(rank, size)]


def check(calls: Sequence[ModelCall]) -> None:
    """Refuses calls that cannot be answered from segments; of their masks see `check_masks`.

    Raises:
        CannotShare: naming the argument, and the fix.
    """
    for call in calls:
        for name, refusal in REFUSED.items():
            if call[name] is not None:
                raise refused(refusal)
        for name, value in call.others.items():
            if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
                raise refused(OTHER_TENSORS, name)
            if isinstance(value, dict | list | set) and not value and name != FILLED_BY_MODEL:
                raise refused(EMPTY_ARGUMENT, name)
    for name in ("labels", "loss_mask", EMBEDDINGS):
        if len({call[name] is None for call in calls}) > 1:
            raise refused(SOME_HAVE, name)
    for call in calls[1:]:
        if call.others != calls[0].others:
            raise refused(DIFFERENT_ARGUMENTS, ", ".join({*call.others, *calls[0].others}))


def slices_of(calls: Sequence[ModelCall], setting: Slices) -> Slices:
    """How calls are cut for context-parallel ranks: as the trainer's setting says, or a packing."""
    modes = {getattr(call["packed_seq_params"], "cp_partition_mode", "") for call in calls}
    return Slices.CONTIGUOUS if "contiguous" in modes else setting


def layouts(
    calls: Sequence[ModelCall],
    cp_size: int,
    sequence_ranks: int = 1,
    setting: Slices = Slices.ZIGZAG,
) -> list[CallLayout] | None:
    """Where the samples of each call are; None on a stage whose calls do not say.

    Args:
        calls: of one model chunk.
        cp_size: context-parallel ranks, each of which has the same share of every row.
        setting: the trainer's, of how they are cut for these ranks.

    Raises:
        CannotShare: a form of packing that is not known, or samples of no position.
    """
    ends = _sample_ends([call["packed_seq_params"] for call in calls])
    places, cut = [], slices_of(calls, setting)
    for call, cumulated in zip(calls, ends, strict=True):
        shape = shape_of(call, sequence_ranks)
        if cumulated is None or (shape is not None and shape[0] > 1):
            if shape is None:
                return None
            # Megatron-RL gives `packed_seq_params` of rows that are not packed, too.
            places.append(CallLayout((shape[1] * cp_size,) * shape[0], False, slices=cut))
            continue
        pairs = itertools.pairwise(cumulated)
        lengths = [end - start for start, end in pairs if end > start]
        if over := 0 if shape is None else shape[1] * cp_size - sum(lengths):
            lengths.append(over)  # what is over the last sample runs through the model as well
        places.append(CallLayout(tuple(lengths), True, over, cut))
    if any(min(layout.lengths, default=0) < 1 for layout in places):
        raise refused(NO_POSITION)
    return places


def shape_of(call: ModelCall, sequence_ranks: int = 1) -> torch.Size | None:
    """[samples, positions] of a call; None if nothing in it says. See `layouts`."""
    if (rows := call[EMBEDDINGS]) is not None:
        return torch.Size((rows.shape[1], rows.shape[0] * sequence_ranks))
    for name in ("input_ids", "labels", "loss_mask"):
        value = call[name]
        # verl gives nested tensors, which are not packed, where no embedding reads them.
        if value is not None and not value.is_nested:
            return value.shape
    return None


def _sample_ends(packings: Sequence[Any]) -> list[list[int] | None]:
    """Per call where its samples begin and end in the whole pack; the host waits once."""
    tensors: list[Tensor | None] = []
    for packing in packings:
        if getattr(packing, "qkv_format", "thd") != "thd":
            raise refused(OTHER_PACKING, repr(packing.qkv_format))
        padded = getattr(packing, "cu_seqlens_q_padded", None)
        # Padding inside a pack belongs to the sample before.
        tensors.append(packing.cu_seqlens_q if packing is not None and padded is None else padded)
    read = [tensor for tensor in tensors if tensor is not None]
    if not read:
        return [None] * len(packings)
    numbers = iter(torch.cat(read).tolist())
    return [None if t is None else [next(numbers) for _ in range(len(t))] for t in tensors]


# Masks -------------------------------------------------------------------------------------------


def check_masks(
    calls: Sequence[ModelCall], use: MaskUse, *, counts_tokens: bool, sequence_ranks: int = 1
) -> None:
    """Refuses masks that segments cannot follow; the host waits only if there are masks.

    A span is computed without its siblings and without padding, so its attention is causal and
    nothing else.  A mask is taken where stock attention is, too: where the mask is the causal one,
    or where transformer-engine's attention is causal by itself and ignores it.

    Args:
        counts_tokens: whether its routers count tokens, those of a `padding_mask` left out.

    Raises:
        CannotShare: naming the mask, and the fix.
    """
    if use is MaskUse.NEEDED and any(call["attention_mask"] is None for call in calls):
        raise refused(NO_MASK)
    masked = [call for call in calls if call["attention_mask"] is not None]
    changes = [_changes_attention(call, use, sequence_ranks) for call in masked]
    if changes and bool(torch.stack(changes).any()):
        raise refused(NOT_CAUSAL)
    if not counts_tokens:
        return
    padded = [call["padding_mask"] for call in calls if call["padding_mask"] is not None]
    if padded and bool(torch.stack([(mask != 0).any() for mask in padded]).any()):
        raise refused(PADDING_MASK)


def _changes_attention(call: ModelCall, use: MaskUse, sequence_ranks: int) -> Tensor:
    """Whether the attention of a call is not the causal one, or might not be; bool []."""
    mask, shape = call["attention_mask"], shape_of(call, sequence_ranks)
    if mask.dim() < 2:
        return _yes(mask)
    square = mask.shape[-1] == mask.shape[-2]
    if use is MaskUse.IGNORED and not square and shape is not None:
        kept = _kept_arguments(mask, shape)
        if kept is not None:  # no token that it keeps sees one that it leaves out, at the end
            return ~kept[:, 0].all() | (kept[:, 1:] & ~kept[:, :-1]).any()
    if mask.dtype != torch.bool or not square:
        return _yes(mask)
    causal = torch.ones_like(mask[(0,) * (mask.dim() - 2)]).triu(1)
    return (mask != causal).any()


def _kept_arguments(mask: Tensor, shape: torch.Size) -> Tensor | None:
    """Which tokens a mask of padding keeps, bool [samples, positions]; None for other masks.

    It has that shape itself, or that of transformer-engine's, [samples, 1, 1, positions], in which
    True is padding (SkyRL's).
    """
    if mask.shape == shape:
        return mask != 0
    rows, *middle = mask.shape[:-1]
    if mask.dtype == torch.bool and middle == [1, 1] and (rows, mask.shape[-1]) == shape:
        return ~mask[:, 0, 0]
    return None


def _yes(like: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.bool, device=like.device)
