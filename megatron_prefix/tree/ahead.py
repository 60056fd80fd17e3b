"""What segments need to predict one token further: next inputs, labels after next, their weights.

Multi-token prediction ("DeepSeek-V3 Technical Report", section 2.2) sees at position i the input of
i+1 and predicts the label of i+1. Inside a span both are the same for all rollouts. At a span's
last position the next input still is (`told_apart`), and the label after it differs by rollout:
the position has a row of logits for each.

Megatron divides the loss of a microbatch by the weights that are left when they have moved by one
(`process_mtp_loss` in megatron/core/transformer/multi_token_prediction.py, before 0.17 in
`_postprocess` of GPTModel), on each context-parallel rank by those of its own positions.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_prefix.tree import cp_layout
from megatron_prefix.tree.forest import Forest, Pairs, Segment, Span

Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]


class Rows(NamedTuple):
    """Rows of logits of a segment on this rank.

    Attributes:
        places: position in the segment, on this rank, int64 [rows], ascending.
        labels: int64 [rows].
        weights: of each label in the loss, in the logged means of microbatches, and how many
            rollouts give it one, float64 [3, rows].
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

    def in_loss(self, left: Floats, whole: Floats) -> Floats:
        """What a weight counts in the loss.

        Args:
            left: sums of weights, moved by one.
            whole: before that.
        """
        if not self.per_token:
            return self.in_mean(left)
        return whole / np.maximum(left, 1) if self.clamps else np.ones_like(left)

    def in_mean(self, left: Floats) -> Floats:
        """What it counts in the logged mean; 0 in a microbatch without any."""
        left = np.maximum(left, 1) if self.clamps_mean else left
        return np.divide(1.0, left, out=np.zeros_like(left), where=left != 0)


def told_apart(samples: Sequence[Pairs]) -> list[Pairs]:
    """Samples whose positions are shared only where next inputs are the same, too: where labels are
    masked these are told, else the labels tell them."""
    if all(np.array_equal(one.labels[:-1], one.inputs[1:]) for one in samples):
        return [*samples]
    return [replace(one, following=np.append(one.inputs[1:], -1)) for one in samples]


class AheadTables:
    """Of all segments of a step, on one context-parallel rank.

    Args:
        forest: the step's segments.
        samples: what it was built from, with weights.
        microbatch_of: the trainer's microbatch of each sample.
        division: Megatron's.
        rank: place in the context-parallel group.
        size: of that group.

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
    ) -> None:
        self._forest, self._samples, self._place = forest, samples, (rank, size)
        left, whole = sums(samples, microbatch_of, size)
        self.undefined = not division.clamps and bool((left[:, rank] == 0).any())
        in_loss, in_mean = division.in_loss(left, whole), division.in_mean(left)
        # What the label after a position counts: by microbatch, and by the rank of the position.
        self._counted = [
            np.stack([in_loss[m, owners] * ahead, in_mean[m, owners] * ahead, ahead != 0])
            for m, owners, ahead in zip(
                microbatch_of, _owners(samples, size), map(_moved, samples), strict=True
            )
        ]

    @property
    def lengths(self) -> list[int]:
        """Positions of every segment on this rank."""
        return [one.padded_length // self._place[1] for one in self._forest.segments]

    def following(self) -> Numbers:
        """Next inputs and their positions of all segments, one behind the other, int64 [2, n];
        zeros behind the end of a rollout, as Megatron fills in, and in padding."""
        table = []
        for span in (span for segment in self._forest.segments for span in segment.spans):
            inputs, places = np.zeros((2, span.padded), np.int64)
            if span.rollouts:  # a filler has none
                ahead = self._samples[span.rollouts[0]].inputs[span.start + 1 : span.end + 1]
                inputs[: len(ahead)] = ahead
                places[: len(ahead)] = np.arange(len(ahead)) + span.start + 1
            table.append(np.stack([inputs, places]))
        whole = np.concatenate(table, axis=1) if table else np.zeros((2, 0), np.int64)
        spans = [span.padded for segment in self._forest.segments for span in segment.spans]
        return whole[:, cp_layout.held_positions(spans, *self._place)]

    def rows(self) -> Iterator[Rows]:
        """Of every segment, those labels that have a weight."""
        return map(self._rows, self._forest.segments)

    def _rows(self, segment: Segment) -> Rows:
        columns = [np.zeros((5, 0))]
        start = 0
        for span in segment.spans:
            columns += self._of_span(span, start)
            start += span.padded
        table = np.concatenate(columns, axis=1)
        if self._place[1] > 1:
            held = cp_layout.held_positions([s.padded for s in segment.spans], *self._place)
            here = np.full(start, -1)
            here[held] = np.arange(len(held))
            table[0] = here[table[0].astype(np.int64)]
        table = table[:, (table[0] >= 0) & (table[2:] != 0).any(axis=0)]
        table = table[:, np.argsort(table[0], kind="stable")]
        places, labels = table[:2].astype(np.int64)
        return Rows(places, labels, table[2:])

    def _of_span(self, span: Span, start: int) -> list[Floats]:
        """Place, label and weights of a span's rows, [5, rows]; `start`: where it begins."""
        inside = np.zeros((3, span.length - 1))
        ends: dict[int, Floats] = {}
        for rollout in span.rollouts:
            sample, counted = self._samples[rollout], self._counted[rollout]
            inside += counted[:, span.start : span.end - 1]
            if span.end < len(sample):
                label = int(sample.labels[span.end])
                ends[label] = ends.get(label, np.zeros(3)) + counted[:, span.end - 1]
        if not span.rollouts:
            return []
        labels = self._samples[span.rollouts[0]].labels[span.start + 1 : span.end]
        places = start + np.arange(span.length - 1)
        last = [
            np.array([start + span.length - 1, label, *weights]).reshape(5, 1)
            for label, weights in ends.items()
        ]
        return [np.concatenate([places[None], labels[None], inside]), *last]


def sums(
    samples: Sequence[Pairs], microbatch_of: Sequence[int], size: int = 1
) -> tuple[Floats, Floats]:
    """Weights of every microbatch on every context-parallel rank, moved by one and as they are:
    float64 [microbatches, size] each."""
    num = max(microbatch_of, default=-1) + 1
    left, whole = np.zeros((2, num, size))
    for sample, m, owners in zip(samples, microbatch_of, _owners(samples, size), strict=True):
        whole[m] += np.bincount(owners, _weights(sample), size)
        left[m] += np.bincount(owners, _moved(sample), size)
    return left, whole


def _weights(sample: Pairs) -> Floats:
    if sample.weights is None:
        raise RuntimeError("a sample without the weights of its labels")
    return sample.weights


def _moved(sample: Pairs) -> Floats:
    """The weight of the label after each position's own."""
    return np.append(_weights(sample)[1:], 0.0)


def _owners(samples: Sequence[Pairs], size: int) -> Iterator[Numbers]:
    """Per sample the context-parallel rank that has each position in the trainer's microbatch."""
    for sample in samples:
        owners = np.zeros(len(sample), np.int64)
        for rank in range(size):
            owners[cp_layout.positions(len(sample), rank, size)] = rank
        yield owners
