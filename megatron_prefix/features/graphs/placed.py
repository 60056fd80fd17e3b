"""Mixers inside of graphs: what differs between segments of a form has a place on the device.

A segment of a form has runs, spans, rows of the arenas that it reads and rows that it writes.  They
are numbers of a `Sheet`, which is filled before a segment's graphs are replayed.  The arenas keep
their places from step to step as well (`PlacedArenas`), so the same graphs read and write the
payloads of any step.  Core attention runs as elsewhere (layers/blocks/core.py), on a context whose
sidecar is these places, and with lengths on the device; so do recurrent layers
(features/recurrent/delta.py), with their spans there (placed_spans.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.device.transfer import to_device
from megatron_prefix.features.graphs.choice import power
from megatron_prefix.features.graphs.placed_arenas import (
    FEW_ROWS,
    PlacedArenas,
    interval_of,
    spare_rows,
    stepped,
)
from megatron_prefix.features.graphs.placed_runs import PlacedRuns, starts_of
from megatron_prefix.features.graphs.placed_spans import PlacedSpans
from megatron_prefix.features.graphs.placed_tails import PlacedTails, TailForm
from megatron_prefix.features.windows.windowed import WindowKeys
from megatron_prefix.layers.segment import SegmentContext
from megatron_prefix.sidecar.arena import KeyValue, Payload, with_returned
from megatron_prefix.sidecar.cache import SegmentState
from megatron_prefix.tree.payload_map import Form, Level, RowMap

FEW_SPANS = 8
"""The spans of a segment that its graphs may have in any case."""

MORE_ROWS = 1.5
"""How many times the keys or spans of a segment its graphs may read."""


class LevelForm(NamedTuple):
    """Of one level: most runs, those of queries without keys among them, and most keys."""

    runs: int
    keys: int


class SpanForm(NamedTuple):
    """Of spans: at most so many, and the positions that convolutions look back."""

    spans: int
    before: int

    @classmethod
    def of(cls, number: int, before: int) -> SpanForm:
        """Of a segment with a number of spans."""
        return cls(power(number) if number <= FEW_SPANS else stepped(number, 1), before)

    def covers(self, other: SpanForm) -> bool:
        """See PlacedForm."""
        most = max(FEW_SPANS, MORE_ROWS * other.spans)
        return self.before == other.before and other.spans <= self.spans <= most


class PlacedForm(NamedTuple):
    """What segments have in common whose mixers are the same launches.

    Attributes:
        positions: queries, on all sequence-parallel ranks.
        inner: whether descendants read it.
        runs: most runs over its own keys.
        levels: of ancestors.
        spans: as recurrent layers see them; None without such layers.
        tails: as layers with windows see them.
    """

    positions: int
    inner: bool
    runs: int
    levels: tuple[LevelForm, ...]
    spans: SpanForm | None = None
    tails: tuple[TailForm, ...] = ()

    @classmethod
    def of(cls, context: SegmentContext, most_runs: int, before: int = 0) -> PlacedForm | None:
        """Of a segment; None if its mixers cannot be in graphs.

        Args:
            before: positions that recurrent layers' convolutions look back; 0: there are none.
        """
        own, planned = context.runs, context.cache.map
        if context.joined or context.cache.exchange is not None or own.queries != own.keys:
            return None
        positions, levels = sum(own.queries), []
        for level in planned.levels[context.index]:
            runs, keys = len(runs_of(level, positions)), sum(level.keys)
            levels.append(LevelForm(power(runs), stepped(keys, FEW_ROWS)))
        number = len(planned.lengths[context.index])
        spans = SpanForm.of(number, before) if before else None
        tails = tuple(TailForm.of(context, form) for form in planned.tails)
        form = cls(positions, context.inner, power(number), tuple(levels), spans, tails)
        fits = max([form.runs, *(level.runs for level in levels)]) <= most_runs
        return form if fits else None

    def covers(self, other: PlacedForm) -> bool:
        """Whether segments of another form can use this one's launches; with up to MORE_ROWS times
        as many keys or spans, as rows that nobody uses are read, too."""
        if (self.positions, self.inner) != (other.positions, other.inner):
            return False
        if len(self.levels) != len(other.levels) or self.runs < other.runs:
            return False
        if self.spans is None or other.spans is None:
            if self.spans is not other.spans:
                return False
        elif not self.spans.covers(other.spans):
            return False
        pairs = zip(self.tails, other.tails, strict=True)
        if not all(tail.covers(needed, MORE_ROWS) for tail, needed in pairs):
            return False
        return all(
            level.runs >= needed.runs and needed.keys <= level.keys <= MORE_ROWS * needed.keys
            for level, needed in zip(self.levels, other.levels, strict=True)
        )


def runs_of(level: Level, positions: int) -> list[tuple[int, int]]:
    """Queries and keys of all runs of a segment's queries, those without keys among them."""
    runs, end = list[tuple[int, int]](), 0
    for run in level.runs:
        if run.first > end:
            runs.append((run.first - end, 0))
        runs.append((run.stop - run.first, run.end - run.start))
        end = run.stop
    return [*runs, (positions - end, 0)] if end < positions else runs


class Sheet:
    """Numbers of one segment of a form, on the device.

    Attributes:
        form: of the segments.
        written: rows of the arenas that an inner segment writes, int64.
        levels: rows that it reads of each level, int64 [most keys].
        runs: over its own keys, and then over those of each level.
        spans: None without recurrent layers.
        tails: of layers with windows.
    """

    def __init__(self, form: PlacedForm, device: torch.device) -> None:
        self.form = form
        sizes = [form.runs + 1]
        for level in form.levels:
            sizes += [level.runs + 1] * 2
        self._num_starts = sum(sizes)
        of_rows = [level.keys for level in form.levels] + [form.positions] * form.inner
        num = self._num_starts + sum(of_rows)
        self._numbers = torch.zeros(num, dtype=torch.int64, device=device)
        self._starts = self._numbers[: self._num_starts].int()
        own, *starts = self._starts.split(sizes)
        _, *rows = self._numbers.split([self._num_starts, *of_rows])
        self.levels, self.written = rows[: len(form.levels)], (rows or [own])[-1]
        most = form.positions
        self.runs = [PlacedRuns(own, own, True, most, most)]
        for (queries, keys), level in zip(_pairs(starts), form.levels, strict=True):
            self.runs.append(PlacedRuns(queries, keys, False, most, level.keys))
        self.spans = PlacedSpans(*form.spans, most, device) if form.spans else None
        self.tails = {tail.form: PlacedTails(tail, form.runs, most, device) for tail in form.tails}

    def fill(self, numbers: Sequence[np.ndarray]) -> None:
        """Puts numbers of a segment into their places; the host does not wait."""
        self._numbers.copy_(to_device(self._numbers.device, np.concatenate(numbers)))
        self._starts.copy_(self._numbers[: self._num_starts])

    def of_segment(self, context: SegmentContext, spares: Mapping[Form, int]) -> None:
        """Fills in a segment; `spares`: the arenas' first spare rows."""
        form, spare = self.form, spares[Form.POSITIONS]
        starts, rows = [starts_of([*context.runs.queries], form.runs)], []
        planned, index = context.cache.map, context.index
        for level, most in zip(planned.levels[index], form.levels, strict=True):
            queries, keys = zip(*runs_of(level, form.positions), strict=True)
            starts += [starts_of(queries, most.runs), starts_of(keys, most.runs)]
            read = [np.arange(run.start, run.end) for run in level.runs]
            rows.append(np.concatenate([*read, spare_rows(most.keys - sum(level.keys), spare)]))
        if form.inner:
            rows.append(_interval(planned.positions, index))
        self.fill([*starts, *rows])
        if self.spans is not None:
            of_spans = planned.lengths[index], planned.parents[index]
            written = [*_interval(planned.spans, index)] if form.inner else []
            self.spans.of_segment(*of_spans, written, spares[Form.SPANS])
        for last, tail in self.tails.items():
            tail.of_segment(planned, index, spares[last])

    def of_none(self, spares: Mapping[Form, int]) -> None:
        """Fills in a segment that reads and writes spare rows, as layers run while captured."""
        form, spare = self.form, spares[Form.POSITIONS]
        starts, rows = [starts_of([form.positions], form.runs)], []
        for most in form.levels:
            starts += [starts_of([form.positions], most.runs), starts_of([most.keys], most.runs)]
            rows.append(spare_rows(most.keys, spare))
        rows += [spare_rows(form.positions, spare)] * form.inner
        self.fill([*starts, *rows])
        if self.spans is not None:
            of_span = [form.positions], [spares[Form.SPANS]]
            self.spans.of_segment(*of_span, [], spares[Form.SPANS])
        for last, tail in self.tails.items():
            tail.of_none(spares[last])


def _pairs(items: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(items[::2], items[1::2], strict=True)


def _interval(rows: RowMap, index: int) -> np.ndarray:
    interval = interval_of(rows, index)
    return np.arange(interval.start, interval.stop)


class _Read(NamedTuple):
    """A level, as core attention reads it."""

    rows: Tensor
    queries: slice


class PlacedCache:
    """The sidecar of a segment while its layers are captured: the places of all layers.

    Attributes:
        layer: that has asked last.
        levels, runs: see Sheet.
    """

    looks_ahead, exchange = False, None

    def __init__(self, sheet: Sheet, arenas: PlacedArenas) -> None:
        self._sheet, self._arenas, self.layer, self.runs = sheet, arenas, -1, sheet.runs
        self._forwards = set[int]()
        self.levels = [_Read(rows, slice(0, sheet.form.positions)) for rows in sheet.levels]

    def own_keys(self, layer: int, index: int, inner: bool, key_value: KeyValue) -> _OwnKeys:
        """See SidecarCache; a layer asks in its forward, and then in its backward."""
        if layer in self._forwards:
            self._forwards.remove(layer)
        else:
            self._forwards.add(layer)
            if inner:
                self.capture(layer, index, key_value)
        sums = self._sums(layer) if inner else ()
        return _OwnKeys(key_value, [*sums], self._sheet)

    def _values(self, layer: int) -> list[Tensor]:
        return self._arenas.values[layer]

    def _sums(self, layer: int) -> list[Tensor]:
        return self._arenas.placed(layer, self._values(layer), sums=True)

    def state(self, layer: int, index: int) -> SegmentState:
        """See SidecarCache: of every forward what it leaves is written."""
        return SegmentState.EMPTY

    def capture(self, layer: int, index: int, payload: Payload) -> None:
        """See SidecarCache."""
        for place, part in zip(self._values(layer), payload, strict=True):
            place.index_copy_(0, self._written(layer), part)

    def take(self, layer: int, index: int) -> Payload:
        """See SidecarCache."""
        written = self._written(layer)
        return tuple(place.index_select(0, written) for place in self._sums(layer))

    def own(self, layer: int, index: int) -> Payload:
        written = self._written(layer)
        return tuple(place.index_select(0, written) for place in self._values(layer))

    def _written(self, layer: int) -> Tensor:
        form = self._arenas.forms[layer]
        if form in self._sheet.tails:
            return self._sheet.tails[form].written
        if self._sheet.spans is not None and form == Form.SPANS:
            return self._sheet.spans.written
        return self._sheet.written

    def once(self, index: int, what: Form, make: Any) -> WindowKeys:
        """See SidecarCache; asked for by layers with windows."""
        return self._sheet.tails[what].keys

    def level(self, index: int, number: int) -> _Read:
        return self.levels[number]

    def read(self, layer: int, index: int, what: Any) -> Payload:
        return tuple(place.index_select(0, what.rows) for place in self._values(layer))

    def add(self, layer: int, index: int, what: Any, gradients: Payload) -> None:
        for total, part in zip(self._sums(layer), gradients, strict=True):
            total.index_add_(0, what.rows, part.to(total.dtype))


class _OwnKeys:
    """See OwnKeys; `sums` of an inner segment's layer."""

    def __init__(self, key_value: KeyValue, sums: Sequence[Tensor], sheet: Sheet) -> None:
        self._both, self._places, self._sheet = key_value, sums, sheet

    def runs(self) -> KeyValue:
        return self._both

    def send(self, gradients: KeyValue) -> None:
        self._both = gradients

    def take(self) -> KeyValue:
        returned = tuple(place.index_select(0, self._sheet.written) for place in self._places)
        return with_returned(self._both, returned or None)


class PlacedContext(SegmentContext):
    """The segment that runs while layers are captured."""

    @classmethod
    def of(cls, sheet: Sheet, arenas: PlacedArenas) -> PlacedContext:
        cache: Any = PlacedCache(sheet, arenas)
        own: Any = sheet.runs[0]
        between: dict[tuple[str, int | None], Any] = {("spans", None): sheet.spans}
        return cls(-1, sheet.form.inner, own, sheet.written, cache, between=between)

    def enter(self, layer: int, *, backward: bool) -> None:
        """See SegmentContext."""
        self.cache.layer = layer  # type: ignore[attr-defined]

    def known(self) -> AbstractContextManager[None]:
        """See PlacedSpans."""
        spans: PlacedSpans | None = self.between["spans", None]
        return spans.known() if spans is not None else contextlib.nullcontext()

    @property
    def layer(self) -> int:
        """The number of the payload of the layer that asked last."""
        return self.cache.layer  # type: ignore[attr-defined]

    @property
    def num_levels(self) -> int:
        return len(self.cache.levels)  # type: ignore[attr-defined]

    @functools.cached_property
    def level_runs(self) -> Any:
        return self.cache.runs[1:]  # type: ignore[attr-defined]
