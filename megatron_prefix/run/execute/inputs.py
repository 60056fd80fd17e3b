"""What segments are computed from: tokens, labels, positions, and the model's other arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.device.transfer import to_device
from megatron_prefix.run.read import heads
from megatron_prefix.tree import Forest, Pairs, cp_layout
from megatron_prefix.tree.forest import any_trained


class ScoredRows(NamedTuple):
    """Positions of a segment on this rank that carry loss, ascending.

    Others make up the number if it is below two, or not what linear layers take: it divides among
    ranks of sequence parallelism, and in FP8 (layers/precision.py).
    """

    on_device: Tensor
    positions: np.ndarray


class SegmentInputs:
    """Tokens, labels and positions of a step's segments.

    They come to the device in two copies: the first segment alone, so that this can begin, and then
    all others.

    Args:
        samples: what the forest was built from; None on a stage that knows no tokens and labels.
        multiple: of the number of rows that are read; segments are a multiple of it on every rank.
    """

    def __init__(
        self,
        forest: Forest,
        samples: Sequence[Pairs] | None,
        device: torch.device,
        rank: int = 0,
        size: int = 1,
        multiple: int = 1,
    ) -> None:
        self.place, self._multiple = (rank, size), multiple
        self._forest, self._samples, self._device = forest, samples, device
        spans = (span for segment in forest.segments for span in segment.spans)
        self.max_position = max((span.start + span.padded - 1 for span in spans), default=0)
        self._made: dict[int, tuple[Tensor, ScoredRows | None]] = {}

    def _of(self, index: int) -> tuple[Tensor, ScoredRows | None]:
        if index not in self._made:
            numbers = range(1, len(self._forest.segments)) if index else range(1)
            self._made.update(zip(numbers, self._inputs(numbers), strict=True))
        return self._made[index]

    def _inputs(self, numbers: range) -> Iterator[tuple[Tensor, ScoredRows | None]]:
        """Per segment its table (see `__getitem__`), and `rows`."""
        segments, samples = [self._forest.segments[number] for number in numbers], self._samples
        offsets = np.cumsum([0, *(segment.padded_length for segment in segments)])
        table = np.zeros((4, offsets[-1]), np.int64)
        spans = [span for segment in segments for span in segment.spans]
        padded = np.array([span.padded for span in spans], np.int64)
        # Padding goes on counting: its positions are legal and its outputs unread.
        before = np.cumsum(padded) - padded - [span.start for span in spans]
        table[2] = np.arange(len(table[2])) - np.repeat(before, padded)
        filled = [span for span in spans if span.rollouts]  # a filler has none
        if samples is not None and filled:
            trained = [sample.trained for sample in samples]
            parts = [(samples[span.rollouts[0]], slice(span.start, span.end)) for span in filled]
            ends = [span.end for span in spans]
            unpadded: Any = np.flatnonzero(table[2] < np.repeat(ends, padded))
            if len(unpadded) == table.shape[1]:
                unpadded = slice(None)  # which is filled faster
            table[0, unpadded] = np.concatenate([sample.inputs[part] for sample, part in parts])
            table[1, unpadded] = np.concatenate([sample.labels[part] for sample, part in parts])
            flags = [any_trained(span, trained, self._forest.first_trained) for span in filled]
            table[3, unpadded] = np.concatenate(flags)
        rank, size = self.place
        if size > 1:
            local = cp_layout.held_positions([span.padded for span in spans], rank, size)
            table = np.ascontiguousarray(table[:, local])
            offsets //= size
        tables = to_device(self._device, table[:3]).split(np.diff(offsets).tolist(), dim=1)
        rows = None if samples is None else self._scored_rows(table[3], offsets)
        return zip(tables, rows or [None] * len(segments), strict=True)

    def __getitem__(self, index: int) -> Tensor:
        """Tokens, labels and positions of a segment, int64 [3, positions]."""
        return self._of(index)[0]

    def rows(self, index: int) -> ScoredRows | None:
        """The positions of a segment that carry loss; None if all do."""
        return self._of(index)[1]

    def call(
        self,
        forward: Callable[..., Any],
        index: int,
        has_labels: bool,
        further: Mapping[str, Any],
        moves_labels: bool = False,
    ) -> Any:
        """Calls a language model on a segment as the trainer calls it on microbatches.

        Args:
            forward: the model's own, inside its wrappers and hooks: the trainer's call goes through
                those, and its answer comes back through them.
            further: what else they have and is about no position (`runtime_gather_output`, ...),
                and what is given instead of tokens.
            moves_labels: whether the model's head runs, and moves labels by one: see
                run/read/heads.py.

        Returns:
            The model's output; on the last stage of the trainer's kind.
        """
        tokens, labels, positions = self[index].unsqueeze(1)
        if has_labels and (rows := self.rows(index)) is not None:
            # As many as there are hidden states in front of the output layer.
            labels = labels.index_select(1, rows.on_device)
        num = labels.shape[1]
        if moves_labels:
            labels = heads.before_moving(labels, self._multiple)
        arguments = {"input_ids": tokens, "position_ids": positions, "attention_mask": None}
        arguments["labels"] = labels if has_labels else None
        output = forward(**arguments | dict(further))
        return heads.without_more(output, num) if moves_labels else output

    def read(self, index: int, moves_labels: bool) -> Tensor | None:
        """The positions of a segment on which the head runs, int64; None: all. A head that moves
        labels has the last one more than once."""
        rows, num = self.rows(index), self[index].shape[1]
        positions = None if rows is None else rows.on_device
        if not moves_labels:
            return positions
        if positions is None:
            positions = torch.arange(num, device=self._device)
        return torch.cat([positions, positions[-1:].expand(self._multiple)])

    def _scored_rows(self, flags: np.ndarray, offsets: np.ndarray) -> list[ScoredRows | None]:
        by_segment: list[np.ndarray] = []
        for start, end in itertools.pairwise(offsets):
            is_scored = flags[start:end] != 0
            scored, unscored = np.flatnonzero(is_scored), np.flatnonzero(~is_scored)
            num_rows = min(max(len(scored), 2), end - start)
            num_rows += -num_rows % self._multiple
            rows = np.concatenate([scored, unscored[: num_rows - len(scored)]])
            by_segment.append(rows if num_rows == len(scored) else np.sort(rows))
        index = to_device(self._device, np.concatenate([np.zeros(0, np.int64), *by_segment]))
        indices = index.split([len(rows) for rows in by_segment])
        lengths = np.diff(offsets)
        return [
            None if len(rows) == length else ScoredRows(on_device, rows)
            for on_device, rows, length in zip(indices, by_segment, lengths, strict=True)
        ]
