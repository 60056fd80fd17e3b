"""What segments need to predict further: inputs and labels further on, and weights of the labels.

Multi-token prediction ("DeepSeek-V3 Technical Report", section 2.2) at depth d sees at position i
the input of i+d and predicts the label of i+d. A span's rollouts have all inputs that are read in
common (`with_next_tokens` in run/read/step.py). Of its last d positions the labels differ by
rollout: such a position has a row of logits for each. A span that several data-parallel ranks have
in common runs on one of them, with the labels and weights of all, which are known before it runs.

Megatron divides the loss of a microbatch by the weights that are left when they have moved by d
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
    """Rows of logits of a segment at one depth, on this rank.

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


class Counted(NamedTuple):
    """What labels further on count in a rollout: few positions have any, as prompts have no loss.

    Attributes:
        places: positions of which the label so far behind counts, int64 [places], ascending.
        counts: its weight in the loss and in the logged mean, and 1, float64 [3, places].
    """

    places: Numbers
    counts: Floats


class LossWeights(NamedTuple):
    """The weights of a rollout's labels, without those that are zero.

    Attributes:
        places: positions whose label has one, int64 [places], ascending.
        weights: float64 [places].
        owners: the context-parallel rank that has each position in the trainer's microbatch, int64
            [positions].
    """

    places: Numbers
    weights: Floats
    owners: Numbers

    @classmethod
    def of(cls, sample: Pairs, size: int) -> LossWeights:
        if sample.weights is None:
            raise RuntimeError("a sample without the weights of its labels")
        places, owners = np.flatnonzero(sample.weights), np.zeros(len(sample), np.int64)
        for rank in range(1, size):
            owners[cp_layout.rank_positions(len(sample), rank, size)] = rank
        return cls(places, sample.weights[places], owners)

    def moved(self, depth: int) -> tuple[Numbers, Floats, Numbers]:
        """Positions of which the label so far behind has a weight, the weights, and the ranks that
        have the positions."""
        first = np.searchsorted(self.places, depth)
        places = self.places[first:] - depth
        return places, self.weights[first:], self.owners[places]


@dataclass(frozen=True)
class Division:
    """How Megatron divides the loss of a microbatch.

    Attributes:
        per_token: with calculate_per_token_loss.
        clamps: since 0.17 it divides by 1 at least, and with `per_token` by the share of the
            weights that are left.
        clamps_mean: since 0.18 also for the logged mean.
        is_fp32: whether that share is fp32, as of weights that are whole numbers or fp32.
    """

    per_token: bool
    clamps: bool
    clamps_mean: bool
    is_fp32: bool = False

    def in_loss(self, shifted: Floats, unshifted: Floats) -> Floats:
        """What a weight counts in the loss.

        Args:
            shifted: sums of weights, moved by the depth.
            unshifted: before that.
        """
        if not self.per_token:
            return _inverse(np.maximum(shifted, 1) if self.clamps else shifted)
        if not self.clamps:
            return np.ones_like(shifted)
        dtype = np.float32 if self.is_fp32 else np.float64
        share = unshifted.astype(dtype) / np.maximum(shifted, 1).astype(dtype)
        return share.astype(np.float64)

    def in_mean(self, shifted: Floats) -> Floats:
        """What it counts in the logged mean; 0 in a microbatch without any."""
        return _inverse(np.maximum(shifted, 1) if self.clamps_mean else shifted)


def _inverse(sums: Floats) -> Floats:
    """One over each; 0 for 0."""
    return np.divide(1.0, sums, out=np.zeros_like(sums), where=sums != 0)


class AheadTables:
    """Of all segments of a step, on one context-parallel rank.

    Args:
        forest: the step's segments.
        samples: what it was built from, with weights.
        microbatch_of: the trainer's microbatch of each sample.
        division: Megatron's.
        rank: place in the context-parallel group.
        size: of that group.
        depths: how many labels further on are predicted.
        apart: tells apart what a label counts in each microbatch.

    Attributes:
        undefined: per depth whether Megatron divides by zero in the mean of a microbatch on this
            rank.
    """

    def __init__(
        self,
        forest: Forest,
        samples: Sequence[Pairs],
        microbatch_of: Sequence[int],
        division: Division,
        rank: int = 0,
        size: int = 1,
        depths: int = 1,
        *,
        apart: bool = False,
    ) -> None:
        self._forest, self._samples, self._place = forest, samples, (rank, size)
        self._microbatch_of = microbatch_of
        self._apart = max(microbatch_of, default=-1) + 1 if apart else 0
        self._nothing = np.zeros((6 + self._apart, 0))
        self._heard: dict[int, list[Floats]] = collections.defaultdict(list)
        self._depths = range(1, depths + 1)
        self.undefined: list[bool] = []
        weights = [LossWeights.of(sample, size) for sample in samples]
        self._counted = {depth: self._counts_at(depth, division, weights) for depth in self._depths}

    def _counts_at(
        self, depth: int, division: Division, weights: Sequence[LossWeights]
    ) -> list[Counted]:
        """By rollout; a label counts by its microbatch, and by the rank of the position."""
        rank, size = self._place
        remaining, full = loss_sums(weights, self._microbatch_of, size, depth)
        self.undefined.append(not division.clamps and bool((remaining[:, rank] == 0).any()))
        in_loss, in_mean = division.in_loss(remaining, full), division.in_mean(remaining)
        result = []
        for of_rollout, m in zip(weights, self._microbatch_of, strict=True):
            places, shares, owners = of_rollout.moved(depth)
            counts = in_loss[m, owners] * shares, in_mean[m, owners] * shares, shares != 0
            result.append(Counted(places, np.stack(counts)))
        return result

    @property
    def lengths(self) -> list[int]:
        """Positions of every segment on this rank."""
        return [segment.padded_length // self._place[1] for segment in self._forest.segments]

    def following(self) -> Numbers:
        """By depth the inputs so far behind, and their positions, of all segments, one behind the
        other, int64 [depths, 2, n]; zeros behind the end of a rollout, as Megatron fills in, and in
        padding."""
        table = [np.zeros((len(self._depths), 2, 0), np.int64)]
        for span in (span for segment in self._forest.segments for span in segment.spans):
            inputs = np.zeros((len(self._depths), 2, span.padded), np.int64)
            for depth in self._depths if span.rollouts else ():  # a filler has none
                sample = self._samples[span.rollouts[0]]
                later = sample.inputs[span.start + depth : span.end + depth]
                inputs[depth - 1, 0, : len(later)] = later
                inputs[depth - 1, 1, : len(later)] = np.arange(len(later)) + span.start + depth
            table.append(inputs)
        whole = np.concatenate(table, axis=2)
        if self._place[1] == 1:
            return whole
        spans = [span.padded for segment in self._forest.segments for span in segment.spans]
        return whole[..., cp_layout.held_positions(spans, *self._place)]

    def told(self, index: int) -> Floats:
        """What the owner of a segment hears of this rank's rollouts: per row its span, place in the
        span, label, depth and weights, float64 [7, rows]."""
        parts = []
        for number, span in enumerate(self._forest.segments[index].spans):
            for depth in self._depths:
                part = self._of_depth(span, depth)
                parts.append(np.concatenate([np.full((1, part.shape[1]), number), part]))
        return np.concatenate(parts, axis=1)

    def hear(self, index: int, spans: Sequence[int], rows: Floats) -> None:
        """Takes what another rank has `told` of some spans of a segment, before `rows` is asked."""
        number, places = np.array(spans)[rows[0].astype(np.int64)], rows[1]
        starts = np.cumsum([0, *(span.padded for span in self._forest.segments[index].spans)])
        self._heard[index].append(np.concatenate([(starts[number] + places)[None], rows[2:]]))

    def rows(self) -> Iterator[list[FurtherRows]]:
        """Of every segment, by depth, those labels that have a weight; none of what another rank
        computes."""
        for index, segment in enumerate(self._forest.segments):
            heard, is_local = self._heard[index], segment.source < 0
            of_depths = (
                self._rows(segment, depth, [rows[:, rows[2] == depth] for rows in heard])
                if is_local
                else self._nothing
                for depth in self._depths
            )
            yield [*map(_split_rows, of_depths)]

    def _rows(self, segment: Segment, depth: int, columns_by_rank: Sequence[Floats]) -> Floats:
        columns = [self._nothing, *columns_by_rank]
        start = 0
        for span in segment.spans:
            part = self._of_depth(span, depth)
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
        table = _merged_rows(table) if columns_by_rank else table
        is_sorted = (table[0, 1:] >= table[0, :-1]).all()
        return table if is_sorted else table[:, np.argsort(table[0], kind="stable")]

    def _of_depth(self, span: Span, depth: int) -> Floats:
        """Place in a span, label, depth and weights of its rows, [6 and more, rows]; of a label
        that some rollout weighs, if by nothing else, by the number of such rollouts."""
        if not span.rollouts:  # a filler
            return self._nothing.copy()
        inside = max(span.length - depth, 0)  # so many positions have their label in the span
        parts: list[Counted] = []
        ends: dict[tuple[int, int], Floats] = {}
        for rollout in span.rollouts:
            labels = self._samples[rollout].labels[span.start + depth :]
            places, counts = self._counts(rollout, span, depth)
            num = int(np.searchsorted(places, inside))
            parts.append(Counted(places[:num], counts[:, :num]))
            for place, of_place in zip(places[num:].tolist(), counts.T[num:], strict=True):
                key = place, int(labels[place])
                ends[key] = ends.get(key, np.zeros(len(of_place))) + of_place
        places, counts = _added(parts)
        labels = self._samples[span.rollouts[0]].labels[span.start + depth :][places]
        table = np.concatenate([np.stack([places, labels, np.full(len(places), depth)]), counts])
        last = [
            np.array([place, label, depth, *of_place]).reshape(-1, 1)
            for (place, label), of_place in ends.items()
        ]
        return np.concatenate([table, *last], axis=1)

    def _counts(self, rollout: int, span: Span, depth: int) -> Counted:
        """What the labels so far behind a span's positions count in a rollout, by place in the
        span, [3 and more, places]."""
        places, counts = self._counted[depth][rollout]
        first, last = np.searchsorted(places, [span.start, span.end])
        places, counts = places[first:last] - span.start, counts[:, first:last]
        if not self._apart:
            return Counted(places, counts)
        apart = np.zeros((self._apart, len(places)))
        apart[self._microbatch_of[rollout]] = counts[0]
        return Counted(places, np.concatenate([counts, apart]))


def _added(parts: Sequence[Counted]) -> Counted:
    """What several rollouts count at the places of all of them."""
    if len(parts) == 1:
        return parts[0]
    places = np.unique(np.concatenate([part.places for part in parts]))
    counts = np.zeros((len(parts[0].counts), len(places)))
    for part in parts:
        counts[:, np.searchsorted(places, part.places)] += part.counts
    return Counted(places, counts)


def _merged_rows(table: Floats) -> Floats:
    """Rows with those of one place, label and depth added up."""
    keys, where = np.unique(table[:3], axis=1, return_inverse=True)
    added = [np.bincount(where.reshape(-1), row, keys.shape[1]) for row in table[3:]]
    return np.concatenate([keys, added])


def _split_rows(table: Floats) -> FurtherRows:
    places, labels = table[:2].astype(np.int64)
    return FurtherRows(places, labels, table[3:])


def loss_sums(
    weights: Sequence[LossWeights], microbatch_of: Sequence[int], size: int = 1, depth: int = 1
) -> tuple[Floats, Floats]:
    """Weights of every microbatch on every context-parallel rank, moved by `depth` and as they are:
    float64 [microbatches, size] each."""
    num = max(microbatch_of, default=-1) + 1
    remaining, full = np.zeros((2, num, size))
    for of_rollout, m in zip(weights, microbatch_of, strict=True):
        for sums, by in ((remaining, depth), (full, 0)):
            _, shares, owners = of_rollout.moved(by)
            sums[m] += np.bincount(owners, shares, size)
    return remaining, full
