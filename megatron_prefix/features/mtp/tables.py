"""What segments need to predict one token further: next inputs, labels after next, their weights.

Multi-token prediction ("DeepSeek-V3 Technical Report", section 2.2) sees at position i the input of
i+1 and predicts the label of i+1. Inside a span both are the same for all rollouts. At a span's
last position the next input still is (`with_next_token` in run/read/step.py), and the label after
it differs by rollout: the position has a row of logits for each. A span that several data-parallel
ranks have in common runs on one of them, with the labels and weights of all, which are known before
it runs.

Megatron divides the loss of a microbatch by the weights that are left when they have moved by one
(`process_mtp_loss` in megatron/core/transformer/multi_token_prediction.py, before 0.17 in
`_postprocess` of GPTModel), on each context-parallel rank by those of its own positions.  Pure.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_prefix.tree import cp_layout
from megatron_prefix.tree.forest import Forest, Pairs, Segment, Span

Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]


class FurtherRows(NamedTuple):
    """FurtherRows of logits of a segment on this rank.

    Attributes:
        places: position in the segment, on this rank, int64 [rows], ascending.
        labels: int64 [rows].
        weights: of each label in the loss, in the logged means of microbatches, and how many
            rollouts give it one, float64 [3, rows]; behind them, where microbatches are told
            apart, what of the first is of each of these.
    """

    places: Numbers
    labels: Numbers
    weights: Floats


@dataclass(frozen=True)
class Division:
    """How Megatron divides the loss of a microbatch.

    Attributes:
        per_token: with calculate_per_token_loss.
        clamps: since 0.17 it divides by 1 at least, and with `per_token` by the share of the
            weights that are left.
        clamps_mean: since 0.18 also for the logged mean.
    """

    per_token: bool
    clamps: bool
    clamps_mean: bool

    def in_loss(self, shifted: Floats, unshifted: Floats) -> Floats:
        """What a weight counts in the loss.

        Args:
            shifted: sums of weights, moved by one.
            unshifted: before that.
        """
        if not self.per_token:
            return self.in_mean(shifted)
        return unshifted / np.maximum(shifted, 1) if self.clamps else np.ones_like(shifted)

    def in_mean(self, shifted: Floats) -> Floats:
        """What it counts in the logged mean; 0 in a microbatch without any."""
        shifted = np.maximum(shifted, 1) if self.clamps_mean else shifted
        return np.divide(1.0, shifted, out=np.zeros_like(shifted), where=shifted != 0)


class AheadTables:
    """Of all segments of a step, on one context-parallel rank.

    Args:
        forest: the step's segments.
        samples: what it was built from, with weights.
        microbatch_of: the trainer's microbatch of each sample.
        division: Megatron's.
        rank: place in the context-parallel group.
        size: of that group.
        apart: tells apart what a label counts in each microbatch.

    Attributes:
        undefined: whether Megatron divides by zero in the mean of a microbatch on this rank.
    """

    def __init__(
        self,
        forest: Forest,
        samples: Sequence[Pairs],
        microbatch_of: Sequence[int],
        division: Division,
        rank: int = 0,
        size: int = 1,
        *,
        apart: bool = False,
    ) -> None:
        self._forest, self._samples, self._place = forest, samples, (rank, size)
        self._microbatch_of = microbatch_of
        self._apart = max(microbatch_of, default=-1) + 1 if apart else 0
        self._nothing = np.zeros((5 + self._apart, 0))
        self._heard: dict[int, list[Floats]] = collections.defaultdict(list)
        remaining, full = loss_sums(samples, microbatch_of, size)
        self.undefined = not division.clamps and bool((remaining[:, rank] == 0).any())
        in_loss, in_mean = division.in_loss(remaining, full), division.in_mean(remaining)
        # What the label after a position counts: by microbatch, and by the rank of the position.
        self._counted = [
            np.stack([in_loss[m, owners] * shares, in_mean[m, owners] * shares, shares != 0])
            for m, owners, shares in zip(
                microbatch_of, _owners(samples, size), map(_moved_labels, samples), strict=True
            )
        ]

    @property
    def lengths(self) -> list[int]:
        """Positions of every segment on this rank."""
        return [segment.padded_length // self._place[1] for segment in self._forest.segments]

    def following(self) -> Numbers:
        """Next inputs and their positions of all segments, one behind the other, int64 [2, n];
        zeros behind the end of a rollout, as Megatron fills in, and in padding."""
        table = []
        for span in (span for segment in self._forest.segments for span in segment.spans):
            inputs, places = np.zeros((2, span.padded), np.int64)
            if span.rollouts:  # a filler has none
                next_tokens = self._samples[span.rollouts[0]].inputs[span.start + 1 : span.end + 1]
                inputs[: len(next_tokens)] = next_tokens
                places[: len(next_tokens)] = np.arange(len(next_tokens)) + span.start + 1
            table.append(np.stack([inputs, places]))
        full = np.concatenate(table, axis=1) if table else np.zeros((2, 0), np.int64)
        spans = [span.padded for segment in self._forest.segments for span in segment.spans]
        return full[:, cp_layout.held_positions(spans, *self._place)]

    def told(self, index: int) -> Floats:
        """What the owner of a segment hears of this rank's rollouts: per row its span, place in the
        span, label and weights, float64 [6, rows]."""
        spans = self._forest.segments[index].spans
        parts = [_weighed(self._of_span(span)) for span in spans]
        numbers = np.repeat(np.arange(len(spans)), [part.shape[1] for part in parts])
        return np.concatenate([numbers[None], np.concatenate(parts, axis=1)])

    def hear(self, index: int, spans: Sequence[int], rows: Floats) -> None:
        """Takes what another rank has `told` of some spans of a segment, before `rows` is asked."""
        number, places = np.array(spans)[rows[0].astype(np.int64)], rows[1]
        starts = np.cumsum([0, *(span.padded for span in self._forest.segments[index].spans)])
        self._heard[index].append(np.concatenate([(starts[number] + places)[None], rows[2:]]))

    def rows(self) -> Iterator[FurtherRows]:
        """Of every segment, those labels that have a weight; none of what another rank computes."""
        for index, segment in enumerate(self._forest.segments):
            is_local = segment.source < 0
            yield (
                self._rows(segment, self._heard[index])
                if is_local
                else FurtherRows(*_split_rows(self._nothing))
            )

    def _rows(self, segment: Segment, columns_by_rank: Sequence[Floats]) -> FurtherRows:
        columns = [self._nothing, *columns_by_rank]
        start = 0
        for span in segment.spans:
            part = self._of_span(span)
            part[0] += start
            columns.append(part)
            start += span.padded
        table = np.concatenate(columns, axis=1)
        if self._place[1] > 1:
            positions = cp_layout.held_positions([s.padded for s in segment.spans], *self._place)
            local_rows = np.full(start, -1)
            local_rows[positions] = np.arange(len(positions))
            table[0] = local_rows[table[0].astype(np.int64)]
            table = table[:, table[0] >= 0]
        table = _weighed(_merged_rows(table) if columns_by_rank else table)
        return FurtherRows(*_split_rows(table[:, np.argsort(table[0], kind="stable")]))

    def _of_span(self, span: Span) -> Floats:
        """Place in a span, label and weights of its rows, [5 and more, rows]."""
        if not span.rollouts:  # a filler
            return self._nothing.copy()
        inside = np.zeros((3 + self._apart, span.length - 1))
        ends: dict[int, Floats] = {}
        for rollout in span.rollouts:
            sample, counted = self._samples[rollout], self._counts(rollout, span)
            inside += counted[:, :-1]
            if span.end < len(sample):
                label = int(sample.labels[span.end])
                ends[label] = ends.get(label, np.zeros(len(inside))) + counted[:, -1]
        labels = self._samples[span.rollouts[0]].labels[span.start + 1 : span.end]
        places = np.arange(span.length - 1)
        last = [
            np.array([span.length - 1, label, *weights]).reshape(-1, 1)
            for label, weights in ends.items()
        ]
        return np.concatenate([np.concatenate([places[None], labels[None], inside]), *last], axis=1)

    def _counts(self, rollout: int, span: Span) -> Floats:
        """What the labels after a span's positions count in a rollout, [3 and more, positions]."""
        counted = self._counted[rollout][:, span.start : span.end]
        if not self._apart:
            return counted
        apart = np.zeros((self._apart, span.length))
        apart[self._microbatch_of[rollout]] = counted[0]
        return np.concatenate([counted, apart])


def _weighed(table: Floats) -> Floats:
    """FurtherRows [5, rows] of which any weight is not zero."""
    return table[:, (table[2:] != 0).any(axis=0)]


def _merged_rows(table: Floats) -> Floats:
    """FurtherRows [5, rows] with those of one place and label added up."""
    keys, where = np.unique(table[:2], axis=1, return_inverse=True)
    added = [np.bincount(where.reshape(-1), row, keys.shape[1]) for row in table[2:]]
    return np.concatenate([keys, added])


def _split_rows(table: Floats) -> tuple[Numbers, Numbers, Floats]:
    """Places, labels and weights of rows [5, rows]."""
    places, labels = table[:2].astype(np.int64)
    return places, labels, table[2:]


def loss_sums(
    samples: Sequence[Pairs], microbatch_of: Sequence[int], size: int = 1
) -> tuple[Floats, Floats]:
    """Weights of every microbatch on every context-parallel rank, moved by one and as they are:
    float64 [microbatches, size] each."""
    num = max(microbatch_of, default=-1) + 1
    remaining, full = np.zeros((2, num, size))
    for sample, m, owners in zip(samples, microbatch_of, _owners(samples, size), strict=True):
        full[m] += np.bincount(owners, _loss_weights(sample), size)
        remaining[m] += np.bincount(owners, _moved_labels(sample), size)
    return remaining, full


def _loss_weights(sample: Pairs) -> Floats:
    if sample.weights is None:
        raise RuntimeError("a sample without the weights of its labels")
    return sample.weights


def _moved_labels(sample: Pairs) -> Floats:
    """The weight of the label after each position's own."""
    return np.append(_loss_weights(sample)[1:], 0.0)


def _owners(samples: Sequence[Pairs], size: int) -> Iterator[Numbers]:
    """Per sample the context-parallel rank that has each position in the trainer's microbatch."""
    for sample in samples:
        owners = np.zeros(len(sample), np.int64)
        for rank in range(size):
            owners[cp_layout.rank_positions(len(sample), rank, size)] = rank
        yield owners
