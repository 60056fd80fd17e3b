"""Which rollouts and microbatches the positions of segments stand for, as device tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.device.transfer import to_device
from megatron_prefix.tree import Forest, Span, cp_layout


class SegmentTokens(NamedTuple):
    """The spans of a segment and the rollouts that share them.

    Attributes:
        span_of: span of every position of this rank, int64 [padded_length]; padding has one more
            span, the last.
        span: the span of every (span, rollout) pair, int64 [pairs].
        rollout: the rollout of every such pair, int64 [pairs].
        copies: rollouts of every span, int64 [spans + 1]; 0 for padding.
        numbers: per microbatch the number of its tokens that the segment stands for.
    """

    span_of: Tensor
    span: Tensor
    rollout: Tensor
    copies: Tensor
    numbers: dict[int, int]


class Closing(NamedTuple):
    """The rollouts of some microbatches, microbatch by microbatch.

    Attributes:
        rollout: int64 [n].
        microbatch: each one's, int64 [n].
        place: its number among these microbatches, int64 [n].
        samples: how many samples Megatron takes its microbatch for, int64 [n]: rows, or one pack.
        tokens: tokens of its microbatch, int64 [n].
    """

    rollout: Tensor
    microbatch: Tensor
    place: Tensor
    samples: Tensor
    tokens: Tensor


class LogicalTokens:
    """The tokens of the trainer's microbatches, and the spans that compute them.

    Args:
        packed: of every microbatch whether its samples are one behind the other in one row.
    """

    def __init__(
        self,
        forest: Forest,
        microbatch_of: Sequence[int],
        device: torch.device,
        rank: int = 0,
        size: int = 1,
        packed: Sequence[bool] = (),
    ) -> None:
        self._lengths, self._device = forest.num_positions, device
        self._microbatch_of = tuple(microbatch_of)
        self._members: list[list[int]] = [[] for _ in range(max(microbatch_of, default=-1) + 1)]
        for rollout, microbatch in enumerate(microbatch_of):
            self._members[microbatch].append(rollout)
        self._packed = tuple(packed) or (False,) * len(self._members)
        self._closings: dict[tuple[int, ...], Closing] = {}
        columns = [c for segment in forest.segments for c in columns_of(segment.spans, rank, size)]
        table = to_device(device, np.concatenate([np.zeros(0, np.int64), *columns]))
        pieces = iter(table.split([len(column) for column in columns]))
        fours = zip(pieces, pieces, pieces, pieces, strict=True)
        self._segments = [
            SegmentTokens(*four, self._numbers(segment.spans))
            for four, segment in zip(fours, forest.segments, strict=True)
        ]

    @property
    def num_rollouts(self) -> int:
        return len(self._microbatch_of)

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each of the trainer's microbatches, the trainer's own padding included."""
        return [sum(self._lengths[r] for r in members) for members in self._members]

    @property
    def has_even_samples(self) -> bool:
        rows = itertools.compress(self._members, (not packed for packed in self._packed))
        return all(len({self._lengths[r] for r in members}) == 1 for members in rows)

    def __getitem__(self, index: int) -> SegmentTokens:
        return self._segments[index]

    def closing(self, microbatches: tuple[int, ...]) -> Closing:
        """The rollouts of `microbatches`; cached, since every layer asks for the same ones."""
        closing = self._closings.get(microbatches)
        if closing is None:
            members = [self._members[m] for m in microbatches]
            columns = [
                (rollout, m, place, 1 if self._packed[m] else len(rollouts), self.num_tokens[m])
                for place, (m, rollouts) in enumerate(zip(microbatches, members, strict=True))
                for rollout in rollouts
            ]
            # In the middle of a step: a plain copy to the device would wait for all before it.
            closing = Closing(*to_device(self._device, np.array(columns)).unbind(1))
            self._closings[microbatches] = closing
        return closing

    def _numbers(self, spans: Sequence[Span]) -> dict[int, int]:
        numbers: dict[int, int] = {}
        for span in spans:
            for rollout in span.rollouts:
                microbatch = self._microbatch_of[rollout]
                numbers[microbatch] = numbers.get(microbatch, 0) + span.length
        return numbers


def columns_of(spans: Sequence[Span], rank: int, size: int) -> list[np.ndarray]:
    """The first four fields of SegmentTokens."""
    numbers, copies = np.arange(len(spans)), [len(span.rollouts) for span in spans]
    lengths = [n for span in spans for n in (span.length, span.padded - span.length)]
    span_of = np.repeat([x for number in numbers for x in (number, len(spans))], lengths)
    return [
        span_of[cp_layout.held_positions([span.padded for span in spans], rank, size)],
        np.repeat(numbers, copies),
        np.array([rollout for span in spans for rollout in span.rollouts], np.int64),
        np.array([*copies, 0]),
    ]
