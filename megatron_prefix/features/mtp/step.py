"""What segments read of multi-token prediction in one step, on the device, and what they log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron_prefix.features.mtp.tables import AheadTables, FurtherRows

if TYPE_CHECKING:
    from torch import Tensor


class _Shares(NamedTuple):
    """What rows of logits weigh in the loss of single microbatches, [shares] each."""

    microbatch: Tensor
    row: Tensor
    weight: Tensor


class FurtherSegment(NamedTuple):
    """What one segment reads at one depth, on the model's device.

    Attributes:
        following: inputs so far behind and their positions, int64 [2, 1, positions].
        distinct: positions with rows of logits, int64; those that this rank of sequence parallelism
            computes.
        repeats: per row of logits which of them it is of; likewise.
        labels: int64 [1, rows], of all ranks of sequence parallelism.
        weights: see `tables.Rows`, float64 [3, rows].
        shares: of the first of these; None where microbatches are not told apart.
    """

    following: Tensor
    distinct: Tensor
    repeats: Tensor
    labels: Tensor
    weights: Tensor
    shares: _Shares | None


class StepAhead:
    """Multi-token prediction in one step.

    Args:
        tables: the step's.
        device: where the model is.
        ranks, rank: sequence-parallel ranks, and this one's place among them.
        logs: whether Megatron logs the losses of this step.
        scales: by which the loss of each microbatch is multiplied, [microbatches], where they may
            differ: filled in before a backward reads them. None: what Megatron's schedule has set.
    """

    def __init__(
        self,
        tables: AheadTables,
        device: Any,
        ranks: int,
        rank: int,
        scales: Tensor | None = None,
        *,
        logs: bool,
    ) -> None:
        import torch

        self._logs, self._undefined = logs, tables.undefined
        self._segments = _on_device(tables, device, ranks, rank)
        self._scales = scales
        self._means: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._nothing = torch.zeros((), device=device, dtype=torch.float64)

    def __getitem__(self, index: int) -> list[FurtherSegment]:
        """What a segment reads, by depth."""
        return self._segments[index]

    def attached(
        self, segment: FurtherSegment, hidden: Tensor, losses: Tensor, factor: float
    ) -> Tensor:
        """The decoder's output; a backward from it goes to the losses of a segment's rows, too.

        Args:
            segment: what it reads at this depth.
            hidden: the decoder's output.
            losses: [1, rows].
            factor: of this loss in the model's.
        """
        from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

        from megatron_prefix.layers.own_backward import with_backward

        scales = self._scales
        if segment.shares is None or scales is None:
            result: Tensor = MTPLossAutoScaler.apply(
                hidden, factor * losses * segment.weights[0].to(losses.dtype)
            )
            return result
        microbatch, row, weight = segment.shares
        shape, dtype = losses.shape, losses.dtype

        def pull(gradient: Tensor) -> tuple[Tensor, Tensor]:
            weights = weight.new_zeros(shape[-1])
            weights.index_add_(0, row, weight * scales[microbatch])
            return gradient, (factor * weights).to(dtype).expand(shape)

        return with_backward(  # type: ignore[no-any-return]
            lambda hidden, _: hidden.view_as(hidden), pull, hidden, losses
        )

    def note(self, index: int, depth: int, *sums: Tensor) -> None:
        """Keeps what a segment adds to Megatron's log; a second forward of it changes nothing.

        Args:
            index: the segment.
            depth: from 0.
            sums: of the loss; since 0.19 how many guesses are right, and how many there are.
        """
        self._means.setdefault((index, depth), tuple(total.detach().double() for total in sums))

    def log(self) -> None:
        """Adds the step to Megatron's log of these losses; call it when the step is over."""
        from megatron.core import parallel_state
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as Log

        if not self._logs:
            return
        save = getattr(Log, "save_metrics_to_tracker", None)
        num, depths = 1 if save is None else 3, len(self._undefined)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for depth, undefined in enumerate(self._undefined):
            sums_at = [sums for (_, place), sums in self._means.items() if place == depth]
            totals = [sum((sums[n] for sums in sums_at), self._nothing) for n in range(num)]
            if undefined:  # Megatron divides by zero
                totals[0] = totals[0] * float("nan")
            (save or Log.save_loss_to_tracker)(*totals, depth, depths, avg_group=group)


def _on_device(
    tables: AheadTables, device: Any, ranks: int, rank: int
) -> list[list[FurtherSegment]]:
    """What the segments of a step read, by depth.

    Args:
        tables: the step's.
        device: where the model is.
        ranks, rank: see `StepAhead`.
    """
    from megatron_prefix.device.transfer import to_device

    rows = [_padded_rows(row, ranks) for by_depth in tables.rows() for row in by_depth]
    nums = [len(segment.labels) for segment in rows]
    local = [
        np.unique(np.split(segment.places, ranks)[rank], return_inverse=True) for segment in rows
    ]
    labels, *place_columns = (
        to_device(device, np.concatenate([np.zeros(0, np.int64), *parts]))
        for parts in ([segment.labels for segment in rows], *zip(*local, strict=True))
    )
    distinct, repeats = place_columns or (labels, labels)
    parts = [np.zeros((3, 0)), *(segment.weights[:3] for segment in rows)]
    weights = to_device(device, np.concatenate(parts, 1))
    following = to_device(device, tables.following())[:, :, None]
    depths, by_segment = len(following), following.split(tables.lengths, 3)
    parts_read = [
        FurtherSegment(*columns)
        for columns in zip(
            [of_depth for of_segment in by_segment for of_depth in of_segment],
            distinct.split([len(unique) for unique, _ in local]),
            repeats.split([len(numbers) for _, numbers in local]),
            labels[None].split(nums, 1),
            weights.split(nums, 1),
            _shares(rows, device),
            strict=True,
        )
    ]
    return [parts_read[first : first + depths] for first in range(0, len(parts_read), depths)]


def _shares(rows: Sequence[FurtherRows], device: Any) -> Iterable[_Shares | None]:
    """Of all segments, on the model's device; None where microbatches are not told apart."""
    from megatron_prefix.device.transfer import to_device

    if all(len(segment.weights) == 3 for segment in rows):
        return [None] * len(rows)
    places = [np.stack(np.nonzero(segment.weights[3:])) for segment in rows]
    weights = [
        segment.weights[3:][tuple(place)] for segment, place in zip(rows, places, strict=True)
    ]
    sizes = [len(weight) for weight in weights]
    microbatch, row = to_device(device, np.concatenate(places, axis=1))
    columns = microbatch, row, to_device(device, np.concatenate(weights))
    return [*map(_Shares, *(column.split(sizes) for column in columns))]


def _padded_rows(rows: FurtherRows, ranks: int) -> FurtherRows:
    """As many rows for every sequence-parallel rank: the last one again, without a weight."""
    extra = -len(rows.places) % ranks
    if not extra:
        return rows
    places = np.pad(rows.places, (0, extra), "edge")
    labels, weights = np.pad(rows.labels, (0, extra)), np.pad(rows.weights, ((0, 0), (0, extra)))
    return FurtherRows(places, labels, weights)
