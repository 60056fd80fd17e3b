"""Windows inside of graphs: which last keys of ancestors a segment reads, and what it leaves of its
own (features/windows/windowed.py), as numbers that have a place on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_prefix.device.transfer import to_device
from megatron_prefix.features.graphs.placed_arenas import FEW_ROWS, interval_of, spare_rows, stepped
from megatron_prefix.features.graphs.placed_runs import PlacedRuns, starts_of
from megatron_prefix.features.windows.windowed import WindowKeys, key_order, last_positions
from megatron_prefix.layers.segment import SegmentContext
from megatron_prefix.sidecar.arena import TailReading
from megatron_prefix.tree.payload_map import Form, PayloadMap


class TailForm(NamedTuple):
    """Of layers with one window.

    Attributes:
        form: of what they leave.
        read: most rows of ancestors.
        repeated: most of these over all spans; shared ones count once a span.
        left: most rows that the segment leaves; 0: nothing reads it.
    """

    form: Form
    read: int
    repeated: int
    left: int

    @classmethod
    def of(cls, context: SegmentContext, form: Form) -> TailForm:
        """Of a segment."""
        planned, index = context.cache.map, context.index
        rows, tails = planned.tails[form]
        read = sum(stop - start for start, stop in tails[index].rows)
        left = rows.intervals[index]
        numbers = read, tails[index].repeated, left.stop - left.start if left is not None else 0
        return cls(form, *(stepped(number, FEW_ROWS) for number in numbers))

    def covers(self, other: TailForm, more: float) -> bool:
        """See PlacedForm; with up to `more` times as many rows."""
        return self.form == other.form and all(
            needed <= number <= more * needed
            for number, needed in zip(self[1:], other[1:], strict=True)
        )


class PlacedTails:
    """What layers with one window know of any segment of a form.

    Args:
        runs, positions: see PlacedForm.

    Attributes:
        keys: see WindowKeys.
        written: rows of the arena that the segment writes. Behind those there is the first again,
            as in what the segment leaves.
    """

    def __init__(self, form: TailForm, runs: int, positions: int, device: torch.device) -> None:
        self._form, self._runs, self._positions = form, runs, positions
        self._num_keys, most = form.repeated + positions, positions + (form.form.last or 0)
        sizes = [2 * (runs + 1), self._num_keys, form.read, form.left, form.left]
        self._numbers = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        starts, order, read, last, self.written = self._numbers.split(sizes)
        self._starts = starts.int()
        of_queries, of_keys = self._starts.chunk(2)
        placed: Any = PlacedRuns(of_queries, of_keys, True, positions, most)
        reading = TailReading(read, ()) if form.read else None
        numbers = form.read, positions, order, placed, last, form.left
        self.keys = WindowKeys(reading, *numbers, None)

    def of_segment(self, planned: PayloadMap, index: int, spare: int) -> None:
        """Fills in a segment; `spare`: the arena's first spare row."""
        rows, tails = planned.tails[self._form.form]
        above, written = tails[index], np.arange(0)
        if self._form.left:
            interval = interval_of(rows, index)
            written = np.arange(interval.start, interval.stop)
        read = [np.arange(*bounds) for bounds in above.rows]
        self._fill(planned.lengths[index], above.spans, read, written, spare)

    def of_none(self, spare: int) -> None:
        """Fills in a segment that reads and writes spare rows."""
        form = self._form
        written = spare + np.arange(form.left) % FEW_ROWS
        self._fill([self._positions], [[(0, form.read)]], [], written, spare)

    def _fill(
        self, lengths: Sequence[int], spans: Sequence[Sequence[tuple[int, int]]],
        read: Sequence[np.ndarray], written: np.ndarray, spare: int,
    ) -> None:  # fmt: skip
        """Puts numbers into their places; the host does not wait."""
        form, window = self._form.form, self._form.form.last or 0
        num_read = sum(map(len, read))
        order, queries, keys = key_order(lengths, spans, window, self._form.read)
        last, _ = last_positions(lengths, [form.rows(length) for length in lengths], 0, 1)
        parts = [
            starts_of(queries, self._runs), starts_of(keys, self._runs),
            _padded(order, self._num_keys, 0), *read, spare_rows(self._form.read - num_read, spare),
        ]  # fmt: skip
        if self._form.left:
            parts += [_padded(rows, self._form.left, rows[0]) for rows in (last, written)]
        self._numbers.copy_(to_device(self._numbers.device, np.concatenate(parts)))
        self._starts.copy_(self._numbers[: len(self._starts)])


def _padded(numbers: np.ndarray, most: int, rest: int) -> np.ndarray:
    return np.concatenate([numbers, np.full(most - len(numbers), rest)])
