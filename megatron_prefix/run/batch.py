"""Between a trainer's microbatches and the schedule's segments.

The trainer's `forward_step_func` keeps its contract: it is called once for every one of its own
microbatches, takes the microbatch from the iterator, calls the model and returns the output with
its loss function.  Two things differ.  The microbatch has lost its first positions, those in front
of the segment with the first trained token; and the model call is answered from the segments'
outputs, joined along the rollout's path.  So normalisation, logging and sequence-level losses are
the trainer's own, whatever is shared.  A `BatchAdapter` says how the trainer's microbatches look.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.errors import UserError
from megatron_prefix.tree import Forest, Pairs, cp_layout


class BatchAdapter(Protocol):
    """What the schedule must know of a trainer's microbatches."""

    def pairs(self, microbatch: Any) -> Sequence[Pairs]:
        """The samples of a microbatch, on the host; with routes, where routers follow them."""

    def group(self, microbatch: Any) -> Hashable:
        """Name of the group that the samples share a prompt with; None: compare with all others."""

    def cut(self, microbatch: Any, num_positions: int) -> Any:
        """The microbatch without the first `num_positions` positions of every sample."""

    def call(self, model: Any, tokens: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        """Runs the model on a segment as `forward_step_func` does on a microbatch.

        Args:
            model: the model chunk that the schedule was given.
            tokens: int64 [1, rows].
            positions: int64 [1, rows].
            labels: int64 [1, rows].

        Returns:
            The last stage's output [1, rows, ...], another stage's [rows, 1, hidden].
        """


class TensorBatchAdapter:
    """Microbatches as Megatron's own loops make them: a mapping of tensors.

    `tokens`, `labels` and `loss_mask` are [batch, positions]; `routes`, where routers follow them,
    [batch, positions, layers, topk]; every other tensor with that second
    dimension is per position and cut along; everything else is passed on.  `group` names the group.
    The model is called with labels (its output is the loss of every position), or, with
    `output="logits"`, without.
    """

    def __init__(self, output: str = "loss") -> None:
        if output not in ("loss", "logits"):
            raise UserError(f"output is {output!r}: give 'loss' or 'logits'")
        self.output = output

    def pairs(self, microbatch: Mapping[str, Any]) -> list[Pairs]:
        """See BatchAdapter."""
        missing = [name for name in ("tokens", "labels", "loss_mask") if name not in microbatch]
        if missing:
            raise UserError(
                f"the microbatch has no {', '.join(missing)}: pass an adapter that knows its form"
            )
        columns = [microbatch[name].cpu().numpy() for name in ("tokens", "labels", "loss_mask")]
        routes = microbatch.get("routes")
        columns.append([None] * len(columns[0]) if routes is None else routes.cpu().numpy())
        return [Pairs(i, o, m != 0, r) for i, o, m, r in zip(*columns, strict=True)]

    def group(self, microbatch: Mapping[str, Any]) -> Hashable:
        """See BatchAdapter."""
        return microbatch.get("group")

    def cut(self, microbatch: Mapping[str, Any], num_positions: int) -> dict[str, Any]:
        """See BatchAdapter."""
        length = microbatch["tokens"].shape[1]

        def cut_one(value: Any) -> Any:
            per_position = (
                isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == length
            )
            return value[:, num_positions:] if per_position else value

        return {name: cut_one(value) for name, value in microbatch.items()}

    def call(self, model: Any, tokens: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        """See BatchAdapter."""
        return model(tokens, positions, None, labels=labels if self.output == "loss" else None)


class SegmentInputs:
    """Tokens, labels and positions of all segments of a step, on the device in one copy.

    Args:
        forest: the step's segments.
        rollouts: what the forest was built from; None on a stage that reads no data, whose tokens
            and labels are never looked at.
        device: where the model is.
        rank: place in the context-parallel group, whose ranks share the rows of every segment.
        size: of that group.
    """

    def __init__(
        self,
        forest: Forest,
        rollouts: Sequence[Pairs] | None,
        device: torch.device,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self._offsets = np.cumsum([0, *(segment.padded_length for segment in forest.segments)])
        table = np.zeros((3, self._offsets[-1]), np.int64)
        for segment, offset in zip(forest.segments, self._offsets[:-1], strict=True):
            for span in segment.spans:
                if rollouts is not None and span.rollouts:  # a filler has none
                    rollout, here = rollouts[span.rollouts[0]], slice(offset, offset + span.length)
                    table[0, here] = rollout.inputs[span.start : span.end]
                    table[1, here] = rollout.labels[span.start : span.end]
                # Padding rows go on counting: their positions are legal and their outputs unread.
                table[2, offset : offset + span.padded] = np.arange(
                    span.start, span.start + span.padded
                )
                offset += span.padded
        self.max_position = int(table[2].max(initial=0))
        if size > 1:
            lengths = [span.padded for segment in forest.segments for span in segment.spans]
            table = np.ascontiguousarray(table[:, cp_layout.held_positions(lengths, rank, size)])
            self._offsets //= size
        host = torch.from_numpy(table)
        if device.type == "cuda":
            host = host.pin_memory()
        self._table = host.to(device, non_blocking=True)

    def __getitem__(self, index: int) -> Tensor:
        """Tokens, labels and positions of a segment, int64 [3, rows]."""
        return self._table[:, self._offsets[index] : self._offsets[index + 1]]


def join(pieces: Sequence[Sequence[Tensor]], num_positions: int) -> Tensor:
    """One microbatch's output from the pieces of its samples.

    Args:
        pieces: per sample outputs [1, positions, ...], in order.
        num_positions: positions of the (cut) microbatch; a sample with fewer pieces begins later.

    Returns:
        [samples, num_positions, ...]; positions in front of a sample's first piece are zero.
    """
    if len(pieces) == 1 and len(pieces[0]) == 1 and pieces[0][0].shape[1] == num_positions:
        return pieces[0][0]
    rows = []
    for sample in pieces:
        missing = num_positions - sum(piece.shape[1] for piece in sample)
        front = sample[0].new_zeros((1, missing, *sample[0].shape[2:]))
        rows.append(torch.cat([front, *sample], dim=1))
    return torch.cat(rows)
