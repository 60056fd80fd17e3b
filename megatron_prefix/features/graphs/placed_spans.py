"""Spans inside of graphs: what recurrent layers know of a segment (features/recurrent/spans.py), as
numbers that have a place on the device.

Graphs have as many spans as their form; those that a segment has not are empty, behind its last.
They begin with the spare row of the arena, and leave there what they began with.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_prefix.device.transfer import to_device
from megatron_prefix.features.graphs.kinds import FLA
from megatron_prefix.features.graphs.pieces import CannotCaptureError
from megatron_prefix.features.recurrent.delta import NUM_INPUTS, parameters_of
from megatron_prefix.features.recurrent.kind import CHUNK
from megatron_prefix.features.recurrent.spans import Edges, edge_numbers, runs_of
from megatron_prefix.sidecar.arena import Reading

CHUNKS, OFFSETS = "prepare_chunk_indices", "prepare_chunk_offsets"
"""Functions of fla.ops.utils.index that make of lengths, which they read on the host, what its
kernels run over: (cu_seqlens, positions of a chunk, ...) -> span and number of every chunk; and the
first chunk of every span. They are no interface: where a rule calls others, capturing it fails, and
it runs between graphs."""


class PlacedSpans:
    """See Spans; of any segment of a form.

    Args:
        most: spans.
        before: positions that convolutions look back.
        positions: of a segment.

    Attributes:
        reading: rows of the arena that spans begin with.
        runs: neighbours with one parent, and its row.
        written: rows of the arena that spans write, if children read them.
        starts, offsets: of spans the first position, and the first chunk, and the ends.
        chunks: of every chunk its span and its number there, [chunks, 2].
    """

    is_one_root, has_parents = False, True

    def __init__(self, most: int, before: int, positions: int, device: torch.device) -> None:
        self._most, self._before, self._num_chunks = most, before, positions // CHUNK + most
        sizes = [most + 1, most + 1, 2 * self._num_chunks, *[most] * 4, *[most * before] * 5]
        self._numbers = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        parts = self._numbers.split(sizes)
        self.starts, self.offsets, chunks, parents, lengths, rows, self.written, *edges = parts
        self.chunks = chunks.view(-1, 2)
        self.reading, self.runs = Reading(parents), (lengths, rows)
        ends = self._numbers[-5 * most * before : -3 * most * before]
        self._edges = Edges(edges[0], ends, *edges[2:])

    def __len__(self) -> int:
        return self._most

    def edges(self, before: int) -> Edges:
        """See Spans.

        Raises:
            CannotCaptureError: a convolution looks back as far as no other.
        """
        if before != self._before:
            raise CannotCaptureError("convolutions of a model have several widths")
        return self._edges

    def of_segment(
        self, lengths: Sequence[int], parents: Sequence[int], written: Sequence[int], spare: int
    ) -> None:  # fmt: skip
        """Fills in a segment; the host does not wait.

        Args:
            lengths, parents: see PayloadMap.
            written: rows of the arena, if children read them.
            spare: its spare row.
        """
        padded = self._padded(lengths, 0)
        rows, numbers = runs_of(parents)
        chunks = -(-padded // CHUNK)
        parts = [
            _starts(padded), _starts(chunks), self._chunk_numbers(chunks),
            self._padded(parents, spare), self._padded(numbers, 0), self._padded(rows, spare),
            self._padded(written, spare), *edge_numbers(padded, self._before),
        ]  # fmt: skip
        self._numbers.copy_(to_device(self._numbers.device, np.concatenate(parts)))

    def _padded(self, numbers: Sequence[int], rest: int) -> np.ndarray:
        result = np.full(self._most, rest, np.int64)
        result[: len(numbers)] = numbers
        return result

    def _chunk_numbers(self, counts: np.ndarray) -> np.ndarray:
        """Of every chunk its span and its number there. Those that are missing are behind the end
        of the last span, where kernels read and write nothing."""
        ends = np.cumsum(counts)
        chunks = np.arange(self._num_chunks)
        spans = np.minimum(np.searchsorted(ends, chunks, side="right"), len(counts) - 1)
        return np.stack([spans, chunks - (ends - counts)[spans]], 1).ravel()

    def run(
        self, rule: Callable[..., Any], arguments: Mapping[str, Any], takes_lengths: bool
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """See Spans. Kernels get a new view each time, or they would remember what they have made
        of numbers that have changed since."""
        if not self._numbers.is_cuda:
            return self._run_masked(rule, {**arguments, "cu_seqlens": None})
        made: tuple[Tensor, Tensor | None]
        made = rule(**{**arguments, "cu_seqlens": self.starts.view(-1)})
        return made

    def _run_masked(
        self, rule: Callable[..., Any], arguments: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Every span as all positions, of which those of others write nothing and forget nothing:
        for the CPU, on which no graph is but a test's."""
        names = parameters_of(rule)[:NUM_INPUTS]
        inputs = [arguments[name] for name in names]
        numbers = torch.arange(inputs[0].shape[1])
        spans = torch.searchsorted(self.starts[1:].contiguous(), numbers, right=True)
        own = (spans == torch.arange(len(self))[:, None])[..., None]
        *values, decays, strengths = (x.expand(len(self), *x.shape[1:]) for x in inputs)
        masked = [*values, *(x.where(own, 0.0) for x in (decays, strengths))]
        out, states = rule(**{**arguments, **dict(zip(names, masked, strict=True))})
        return out.where(own[..., None], 0.0).sum(0, keepdim=True), states

    @contextlib.contextmanager
    def known(self) -> Iterator[None]:
        """While layers are captured flash-linear-attention has chunks of these spans from here."""
        modules = [vars(m) for name, m in [*sys.modules.items()] if name.startswith(FLA)]
        of_spans = {CHUNKS: self.chunks, OFFSETS: self.offsets}
        replaced = [(names, name, names[name]) for names in modules for name in of_spans
                    if name in names]  # fmt: skip
        try:
            for names, name, stock in replaced:
                names[name] = self._known_or(of_spans[name], stock)
            yield
        finally:
            for names, name, stock in replaced:
                names[name] = stock

    def _known_or(self, made: Tensor, stock: Callable[..., Any]) -> Callable[..., Any]:
        def prepare(cu_seqlens: Tensor, chunk_size: int, *args: Any, **kwargs: Any) -> Any:
            if cu_seqlens.data_ptr() != self.starts.data_ptr():
                return stock(cu_seqlens, chunk_size, *args, **kwargs)
            if chunk_size != CHUNK:
                raise CannotCaptureError(f"a rule has chunks of {chunk_size} positions")
            return made

        return prepare


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])
