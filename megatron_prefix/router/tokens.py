"""What the rows of segments stand for, as numbers on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.attention import zigzag
from megatron_prefix.tree import Forest, Row


class SegmentRows(NamedTuple):
    """The rows of a segment.

    Attributes:
        row_of: row of every position of this rank, int64 [num_rows]; padding belongs to one row
            more.
        row: row of every pair of a row and a rollout through it, int64 [pairs].
        rollout: the rollout of every such pair, int64 [pairs].
        copies: rollouts through every row, int64 [rows + 1]; 0 for padding.
        tokens: by microbatch of the trainer, how many of its tokens the segment stands for.
    """

    row_of: Tensor
    row: Tensor
    rollout: Tensor
    copies: Tensor
    tokens: dict[int, int]


class Closing(NamedTuple):
    """The rollouts of some of the trainer's microbatches, microbatch by microbatch.

    Attributes:
        rollout: int64 [n].
        place: place of each one's microbatch among these microbatches, int64 [n].
        samples: rollouts of its microbatch, int64 [n].
        tokens: tokens of its microbatch, int64 [n].
    """

    rollout: Tensor
    place: Tensor
    samples: Tensor
    tokens: Tensor


class LogicalTokens:
    """The tokens of the trainer's microbatches, and the rows that compute them.

    Args:
        forest: the step's segments.
        owner: the trainer's microbatch of each rollout.
        device: where the model is.
        rank: place in the context-parallel group, whose ranks share the positions of every row.
        size: of that group.
    """

    def __init__(
        self,
        forest: Forest,
        owner: Sequence[int],
        device: torch.device,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self._lengths, self._owner, self._device = forest.num_positions, tuple(owner), device
        self._members: list[list[int]] = [[] for _ in range(max(owner, default=-1) + 1)]
        for rollout, microbatch in enumerate(owner):
            self._members[microbatch].append(rollout)
        self._closings: dict[tuple[int, ...], Closing] = {}
        columns = [c for segment in forest.segments for c in _columns(segment.rows, rank, size)]
        table = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *columns])).to(device)
        pieces = iter(table.split([len(column) for column in columns]))
        fours = zip(pieces, pieces, pieces, pieces, strict=True)
        self._segments = [
            SegmentRows(*four, self._tokens(segment.rows))
            for four, segment in zip(fours, forest.segments, strict=True)
        ]

    @property
    def num_rollouts(self) -> int:
        """Rollouts of the step."""
        return len(self._owner)

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each of the trainer's microbatches, the trainer's own padding included."""
        return [sum(self._lengths[r] for r in members) for members in self._members]

    @property
    def has_even_samples(self) -> bool:
        """Whether the samples of every microbatch are equally long."""
        return all(len({self._lengths[r] for r in members}) == 1 for members in self._members)

    def __getitem__(self, index: int) -> SegmentRows:
        """The rows of segment `index`."""
        return self._segments[index]

    def closing(self, microbatches: tuple[int, ...]) -> Closing:
        """The rollouts of `microbatches`; kept, since every layer asks for the same ones."""
        found = self._closings.get(microbatches)
        if found is None:
            members = [self._members[m] for m in microbatches]
            columns = [
                (rollout, place, len(rollouts), sum(self._lengths[r] for r in rollouts))
                for place, rollouts in enumerate(members)
                for rollout in rollouts
            ]
            found = Closing(*torch.tensor(columns, device=self._device).unbind(1))
            self._closings[microbatches] = found
        return found

    def _tokens(self, rows: Sequence[Row]) -> dict[int, int]:
        tokens: dict[int, int] = {}
        for row in rows:
            for rollout in row.rollouts:
                microbatch = self._owner[rollout]
                tokens[microbatch] = tokens.get(microbatch, 0) + row.length
        return tokens


def _columns(rows: Sequence[Row], rank: int, size: int) -> list[np.ndarray]:
    """The first four fields of SegmentRows."""
    numbers, copies = np.arange(len(rows)), [len(row.rollouts) for row in rows]
    spans = [span for row in rows for span in (row.length, row.padded - row.length)]
    row_of = np.repeat([x for number in numbers for x in (number, len(rows))], spans)
    return [
        row_of[zigzag.segment_rows([row.padded for row in rows], rank, size)],
        np.repeat(numbers, copies),
        np.array([rollout for row in rows for rollout in row.rollouts], np.int64),
        np.array([*copies, 0]),
    ]
