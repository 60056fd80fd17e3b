"""Outputs of segments, put together as the outputs of the trainer's model calls.

The outputs of scored segments are detached leaves. Along its samples' paths a microbatch's outputs
are put together in the layout of its model call; positions that carry no loss are zero. What losses
send to a leaf is the gradient with which the segment's backward starts.

With context parallelism the ranks share the rows of every segment, and every microbatch, but not
along the same lines: a segment is cut zig-zag by itself, a microbatch as a whole, as the trainer
cuts it.  So leaves are whole outputs, gathered when a segment has run, and a microbatch takes its
rank's positions of the joined outputs; what reaches a leaf on any rank is added up before the
segment's backward.  Ranks of sequence parallelism share the rows of some tensors in the same way,
one rank's behind another's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import (
    _pytree as pytree,  # torch's own; torch.utils.pytree is not public before 2.9
)

from megatron_prefix.device.transfer import to_device
from megatron_prefix.errors import refused
from megatron_prefix.refusals.table import DIFFERENT_OUTPUTS, FLAT_ROWS, OTHER_OUTPUT, OTHER_SHAPE
from megatron_prefix.run.calls import CallLayout
from megatron_prefix.run.execute.inputs import ScoredRows
from megatron_prefix.run.read.heads import FilledDict
from megatron_prefix.run.read.step import Step
from megatron_prefix.sidecar.arena import Rows
from megatron_prefix.sidecar.row_exchange import RowExchange
from megatron_prefix.tree import Place, Span

FLAT = -1
"""Instead of a dimension: the tensor is [positions], without a dimension for the batch."""
CHECKED_ROWS = 1024
"""Rows of logits of which gradients are looked at together: each time these are copied."""


class Axis(NamedTuple):
    """Where a tensor is per position.

    Attributes:
        parts: ranks of sequence parallelism that share it.
    """

    dim: int
    parts: int = 1


class AnswerForm(NamedTuple):
    """How the model calls of a rank are answered.

    Attributes:
        exchange: between context-parallel ranks; None if there is one.
        sequence: between ranks of sequence parallelism; None without.
        short: positions at the end of a row of which the model returns nothing: see
            run/read/heads.py.
        filled: what it puts into a dict that calls bring; None: these bring none.
    """

    exchange: RowExchange | None = None
    sequence: RowExchange | None = None
    short: int = 0
    filled: FilledDict | None = None


class OutputPiece(NamedTuple):
    """Logits of a span, [rows, vocabulary].

    Attributes:
        logits: a leaf; its gradient is a part of that of `whole`.
        positions: in the span, that they are of.
        whole: the segment's logits.
        place: rows in it.
    """

    logits: Tensor
    positions: np.ndarray
    whole: Tensor
    place: slice

    def prepare(self) -> None:
        """Makes room for the gradient, to which autograd adds what every loss sends."""
        if self.logits.grad is None:
            if self.whole.grad is None:
                self.whole.grad = torch.zeros_like(self.whole)
            self.logits.grad = self.whole.grad[self.place]


class SegmentOutput(NamedTuple):
    """A segment's output.

    Attributes:
        leaves: its tensors, detached, and plain values.
        rows: the positions that were computed; None: all.
        pieces: per leaf of logits one per span; of other leaves none.
    """

    leaves: list[Any]
    rows: ScoredRows | None
    pieces: list[list[OutputPiece]]


class CallOutputs:
    """Outputs of segments on the last stage, and of the trainer's model calls.

    Attributes:
        kept: outputs of segments that answers still need.
        guards: zeros for positions that nobody computed; what reaches them is their
            `grad`.
    """

    def __init__(self, step: Step, form: AnswerForm) -> None:
        self._forest, self._packed, self._slices = step.forest, step.packed, step.slices
        self._form, self._exchange = form, form.exchange
        self.kept: dict[int, SegmentOutput] = {}
        self._strays: list[Tensor] = []
        self._structure: Any = None
        self._axes: list[Axis | None] = []
        self._plain: list[Any] = []
        self._index: dict[CallLayout, Tensor] = {}
        self._bounds = [  # where spans begin in a segment's output, and where the last one ends
            [*itertools.accumulate((span.padded for span in segment.spans), initial=0)]
            for segment in step.forest.segments
        ]
        self.guards: list[Tensor] = []

    def take(
        self, index: int, output: Any, rows: ScoredRows | None = None, *, differentiable: bool
    ) -> None:
        """Takes a segment's output: a tensor, or a tree of tensors that are per position.

        Args:
            output: of all its positions on this rank, or of `rows`, the others then are zero.
        """
        spans = self._forest.segments[index].spans
        lengths = [span.padded for span in spans]
        num = sum(lengths) // (1 if self._exchange is None else self._exchange.size)
        leaves, structure = pytree.tree_flatten(output)
        self._remember(leaves, structure, num if rows is None else len(rows.positions))
        outputs: list[Any] = []
        for leaf, axis in zip(leaves, self._axes, strict=True):
            if axis is None:
                outputs.append(leaf)
                continue
            values = leaf.detach() if axis.dim == FLAT else leaf.detach().squeeze(1 - axis.dim)
            if axis.parts > 1:
                (values,) = self._form.sequence.gather(values).wait()  # type: ignore[union-attr]
            if rows is not None and self._is_whole(values):
                zeros = values.new_zeros((num, *values.shape[1:]))
                values = zeros.index_copy_(0, rows.on_device, values)
            if self._exchange is not None:
                values = self._exchange.whole(values[None], lengths)[0]
            # A forward that will run again has no graph yet, so the leaf cannot ask for one.
            outputs.append(values.requires_grad_(differentiable and leaf.is_floating_point()))
        positions = None if rows is None or self._exchange is not None else rows.positions
        pieces = [
            [] if axis is None or leaf.dim() == 1 else _rows_of_spans(leaf, spans, positions)
            for leaf, axis in zip(outputs, self._axes, strict=True)
        ]
        self.kept[index] = SegmentOutput(outputs, rows, pieces)

    def _is_whole(self, tensor: Tensor) -> bool:
        """Whether a leaf has all positions of its segment: logits, which are large, do not have to,
        unless context-parallel ranks gather them."""
        return tensor.dim() == 1 or self._exchange is not None

    def gradients(self, index: int, output: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors of a segment's output that have a graph, and what all losses send to them."""
        lengths = [span.padded for span in self._forest.segments[index].spans]
        tensors, gradients = [], []
        kept, leaves = self.kept[index], pytree.tree_leaves(output)
        for tensor, leaf, axis in zip(leaves, kept.leaves, self._axes, strict=True):
            if axis is None or not tensor.requires_grad:
                continue
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            if self._exchange is not None:
                gradient = self._exchange.share(gradient[None], lengths)[0]
            tensors.append(tensor)
            if kept.rows is not None and self._is_whole(gradient):
                read = gradient.index_select(0, kept.rows.on_device)
                # What is left has reached positions that nobody computed.
                self._strays.append(largest(gradient.index_fill_(0, kept.rows.on_device, 0.0)))
                gradient = read
            if axis.parts > 1:  # what losses on all of the ranks send
                (gradient,) = self._form.sequence.reduce_scatter(gradient).wait()  # type: ignore[union-attr]
            gradients.append(gradient if axis.dim == FLAT else gradient.unsqueeze(1 - axis.dim))
        return tensors, gradients

    def strays(self) -> list[Tensor]:
        """Sizes of the gradients that have reached positions which nobody computed."""
        gradients = (guard.grad for guard in self.guards)
        return [
            *self._strays,
            *(largest(gradient) for gradient in gradients if gradient is not None),
        ]

    def answer(self, microbatch: int, rollouts: Sequence[int]) -> Any:
        """A microbatch's output in the layout of its call, in memory of its own.

        Positions that carry no loss are zero; a gradient that reaches one is an error
        (`Losses.check`).
        """
        if self._structure is None:
            raise RuntimeError("no segment has an output")
        lengths = tuple(self._forest.num_positions[rollout] for rollout in rollouts)
        packed = self._packed[microbatch]
        layout = CallLayout(lengths, packed, slices=self._slices)
        outputs = []
        plain = iter(self._plain)
        for number, axis in enumerate(self._axes):
            if axis is None:
                outputs.append(next(plain))
                continue
            samples = self._joined(rollouts, number)
            if self._exchange is not None:
                samples = self._on_this_rank(samples, layout, self._exchange)
            if axis.dim == FLAT and not packed and len(rollouts) > 1:
                raise refused(FLAT_ROWS, len(rollouts))
            outputs.append(self._laid_out(samples, axis, 1 if packed else len(rollouts)))
        return pytree.tree_unflatten(outputs, self._structure)

    def _laid_out(self, samples: Tensor, axis: Axis, num_rows: int) -> Tensor:
        if axis.dim == FLAT:
            return samples
        rows = samples.unflatten(0, (num_rows, -1))
        if self._form.short:
            rows = rows[:, : -self._form.short]
        if axis.dim == 0:
            rows = rows.transpose(0, 1).contiguous()
        if axis.parts == 1:
            return rows
        num, rank = len(rows) // axis.parts, self._form.sequence.rank  # type: ignore[union-attr]
        return rows[rank * num : (rank + 1) * num].clone()  # the other ranks' need not live on

    def _remember(self, leaves: list[Any], structure: Any, num: int) -> None:
        parts = 1 if self._form.sequence is None else self._form.sequence.size
        axes = [_axis(leaf, num, parts) for leaf in leaves]
        plain = [leaf for leaf, axis in zip(leaves, axes, strict=True) if axis is None]
        if self._structure is None:
            self._structure, self._axes, self._plain = structure, axes, plain
        elif structure != self._structure or plain != self._plain:
            raise refused(DIFFERENT_OUTPUTS, structure)
        elif num > 1:  # of one position either dimension could be the one
            self._axes = axes

    def _on_this_rank(self, samples: Tensor, layout: CallLayout, exchange: RowExchange) -> Tensor:
        if layout not in self._index:
            positions = layout.held(exchange.rank, exchange.size)
            self._index[layout] = to_device(samples.device, positions)
        return samples.index_select(0, self._index[layout])

    def _joined(self, rollouts: Sequence[int], number: int) -> Tensor:
        places = [place for rollout in rollouts for place in self._places(rollout)]
        last = self._forest.paths[rollouts[-1]][-1]
        like = self.kept[last.segment].leaves[number]
        if like.dim() > 1:
            return self._assembled(places, number, like)
        used = sorted({place.segment for place, _ in places if place})
        begins, total = dict[int, int](), 0  # of segments whose outputs lie one behind the other
        for segment in used:
            begins[segment] = total
            total += self._bounds[segment][-1]
        index = []
        missing = total  # zeros behind the outputs stand for positions that nobody computed
        for place, length in places:
            if place:
                start = begins[place.segment] + self._bounds[place.segment][place.number]
            else:
                start, missing = missing, missing + length
            index.append(np.arange(start, start + length))
        outputs = [self.kept[segment].leaves[number] for segment in used]
        rows = torch.cat([*outputs, self._guard(like, missing - total)])
        return rows.index_select(0, to_device(like.device, np.concatenate(index)))

    def _places(self, rollout: int) -> Iterator[tuple[Place | None, int]]:
        """Where a rollout's outputs are, and of how many positions; None: nobody computed them."""
        num_missing = self._forest.num_positions[rollout]
        for place in self._forest.paths[rollout]:
            segment = self._forest.segments[place.segment]
            length = segment.spans[place.number].length
            num_missing -= length
            yield place if segment.scored else None, length
        if num_missing:
            yield None, num_missing

    def _assembled(
        self, places: Sequence[tuple[Place | None, int]], number: int, like: Tensor
    ) -> Tensor:
        """Logits along places: no second copy of them, and zeros where nobody computed any."""
        pieces, targets, uncomputed, offset = [], [], [], 0
        for place, length in places:
            local = np.arange(0)
            if place:
                piece = self.kept[place.segment].pieces[number][place.number]
                pieces.append(piece)
                local = piece.positions
                targets.append(offset + local)
            uncomputed.append(offset + np.setdiff1d(np.arange(length), local))
            offset += length
        missing = np.concatenate(uncomputed)
        index = to_device(like.device, np.concatenate([*targets, missing]))
        *places_of, rows_missing = index.split([*map(len, targets), len(missing)])
        rows = [_as_interval(*rows_of) for rows_of in zip(targets, places_of, strict=True)]
        guard = self._guard(like, min(1, len(missing)))
        parts = [piece.logits for piece in pieces]
        logits: Tensor = _Assembled.apply(guard, rows, rows_missing, offset, pieces, *parts)
        return logits

    def _guard(self, like: Tensor, length: int) -> Tensor:
        """Zeros, [length], for positions that nobody computed: `Losses.check` reads their grad."""
        guard = like.new_zeros(length)
        if length and like.requires_grad:
            self.guards.append(guard.requires_grad_())
        return guard


def _rows_of_spans(
    leaf: Tensor, spans: Sequence[Span], rows: np.ndarray | None
) -> list[OutputPiece]:
    """Logits of a segment by span. What losses send to them, one after the other, is added up in
    parts of one buffer, the gradient of the segment's.

    Args:
        leaf: [rows, vocabulary].
        rows: positions in the segment, padding included, ascending; None: all.
    """
    ends = np.cumsum([span.padded for span in spans])
    rows = np.arange(ends[-1]) if rows is None else rows
    counts = np.diff(np.searchsorted(rows, ends), prepend=0)
    pieces = []
    parts = zip(np.cumsum(counts), np.split(rows, np.cumsum(counts)[:-1]), strict=True)
    for span, end, (stop, in_span) in zip(spans, ends, parts, strict=True):
        local = in_span - (end - span.padded)
        num = int(np.searchsorted(local, span.length))  # padding is nobody's
        place = slice(int(stop) - len(in_span), int(stop) - len(in_span) + num)
        logits = leaf.detach()[place].requires_grad_(leaf.requires_grad)
        pieces.append(OutputPiece(logits, local[:num], leaf, place))
    return pieces


def _as_interval(rows: np.ndarray, index: Tensor) -> Rows:
    """Ascending rows as an interval if they are one, whose gradient is a view; else `there`."""
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return index


class _Assembled(torch.autograd.Function):
    """Logits at their rows, and zeros at the others; what reaches those is the guard's gradient."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, guard: Tensor, rows: Sequence[Rows], missing: Tensor, num: int,
        pieces: Sequence[OutputPiece], *parts: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.rows, ctx.pieces = (rows, missing), pieces
        out = parts[0].new_zeros((num, *parts[0].shape[1:]))
        for place, part in zip(rows, parts, strict=True):
            out[place] = part
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, missing = ctx.rows
        stray = None
        if len(missing):
            parts = missing.split(CHECKED_ROWS)
            sizes = [largest(gradient.index_select(0, part)) for part in parts]
            stray = torch.stack(sizes).amax().view(1).to(gradient.dtype)
        for piece in ctx.pieces:
            piece.prepare()
        return stray, None, None, None, None, *(gradient[place] for place in rows)


def largest(gradient: Tensor) -> Tensor:
    """The largest element that is finite, by absolute value; `gradient` is overwritten.

    A loss that is not finite sends NaN to masked positions, too, which is for the trainer to see.
    """
    return gradient.nan_to_num_(0.0, 0.0, 0.0).abs_().amax().float()


def _axis(leaf: Any, num: int, parts: int) -> Axis | None:
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return None
    if not isinstance(leaf, Tensor):
        raise refused(OTHER_OUTPUT, type(leaf).__name__)
    shape = leaf.shape
    if shape == (num,):  # verl's fused kernels
        return Axis(FLAT)
    if len(shape) > 1 and shape[0] == 1 and shape[1] == num:
        return Axis(1)
    if len(shape) > 1 and shape[1] == 1 and num in (shape[0], shape[0] * parts):
        return Axis(0, num // shape[0])
    raise refused(OTHER_SHAPE, list(shape), num)
