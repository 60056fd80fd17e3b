"""What a vision-language model gives its language model instead of tokens.

Such a model calls its language model with embeddings of text and images (`decoder_input`), with
three positions a token (mrope), and with rows that its first layers add (deepstack).  That call is
where forward steps are suspended, so its rows are compared as tokens are: each gets a number that
is made of its bits, of its positions and of its deepstack rows, and the tree is built of these
numbers.  A segment is computed from one copy of every row, and what its backward sends to them goes
on into that copy's own graph: the graphs of copies are the same function of the same weights, and
backward is linear in the gradient.

On later pipeline stages, which get hidden states, only positions are given, each stage its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_prefix.device.transfer import to_device, to_host
from megatron_prefix.errors import refused
from megatron_prefix.features.vision.call_rows import DEEPSTACK, MASK, CallRows, Places
from megatron_prefix.features.vision.fingerprints import combined
from megatron_prefix.features.vision.models import POSITIONS_FIRST
from megatron_prefix.megatron.families import calls_parent, forward_owner, has_mrope
from megatron_prefix.refusals.table import NO_POSITION_IDS, PACKS_INSIDE
from megatron_prefix.run.calls import BLOCK, EMBEDDINGS, ModelCall, shape_of
from megatron_prefix.run.rank import Rank, gathered
from megatron_prefix.run.read.step import Step
from megatron_prefix.tree import cp_layout

Numbers = np.ndarray


@dataclass
class Leaf:
    """A segment's rows: what its forward has begun with.

    Attributes:
        rows: the copies that they were taken from: positions of all samples one behind the other,
            int64 [positions of the whole segment]; -1 for padding.
        mine: those of this rank.
        tensors: embeddings and deepstack rows.
    """

    rows: Numbers
    mine: Numbers
    tensors: list[Tensor]


class ChunkRows:
    """What the calls of one model chunk have instead of tokens.

    Args:
        calls: of the chunk, in order.
        rank: this one.
        chunk: number of the chunk on it.

    Raises:
        CannotShare: the model needs positions, and a call has none.
    """

    def __init__(self, calls: Sequence[ModelCall], rank: Rank, chunk: int) -> None:
        model = rank.language_models[chunk]
        self._cp, self._tp, self._device = rank.groups.cp, rank.groups.tp, rank.device
        self._sequence_ranks = rank.model.sequence_ranks
        self._positions_first = forward_owner(model) in POSITIONS_FIRST
        self._in_block = any(DEEPSTACK in (call[BLOCK] or {}) for call in calls)
        self._block = dict(calls[0].others.get(BLOCK, {})) if calls else {}
        self._stacked = any(isinstance(call.keyword(DEEPSTACK), Tensor) for call in calls)
        multimodal = has_mrope(model)
        self._ids = [call["position_ids"] for call in calls] if multimodal else []
        if any(ids is None for ids in self._ids):
            raise refused(NO_POSITION_IDS)
        self._shapes = [shape_of(call) for call in calls]
        has_rows = bool(calls) and calls[0][EMBEDDINGS] is not None
        call_rows = [CallRows.of(call, self._positions_first) for call in calls if has_rows]
        self._calls: list[CallRows] = call_rows
        self._tokens: Tensor | None = None
        self._positions: Tensor | None = None
        self._images = np.zeros(0, bool)
        self._depth, self._owner = 0, np.zeros(0, np.int64)
        self._leaves: dict[int, Leaf] = {}

    @property
    def trains(self) -> bool:
        """Whether gradients go on behind the rows."""
        return any(call.trains for call in self._calls)

    # Rows as tokens -------------------------------------------------------------------------------

    def codes(self, lengths: Sequence[int], tokens: Numbers | None) -> Numbers:
        """Numbers of this rank's positions, equal where rows and positions are; all ranks of a
        stage call this.

        Args:
            lengths: positions of every sample, whole.
            tokens: of this rank's positions. Beside embeddings they tell rows apart, too: layers
                of multi-token prediction read them.
        """
        positions = to_device(self._device, self._held(lengths))
        if self._calls:
            columns = [
                torch.stack([call.words(), (call.numbers >= 0).long()], -1) for call in self._calls
            ]
            # Ranks of sequence parallelism hold the same samples, one rank's rows after another's.
            full = [self._over_sequence(column).transpose(0, 1) for column in columns]
            words, images = torch.cat([part.flatten(0, 1) for part in full]).unbind(-1)
            self._images = to_host(self._over_cp(images.contiguous(), lengths)) != 0
            depth = torch.tensor(
                [max(len(call_rows.deep) for call_rows in self._calls)], device=self._device
            )
            self._depth = int(self._exchanged(depth, dist.ReduceOp.MAX))
            if tokens is not None:
                words = combined(words, to_device(self._device, tokens))
        else:
            words = torch.from_numpy(tokens).to(self._device)  # type: ignore[arg-type]
            self._tokens = self._over_cp(words, lengths)
        if self._ids:
            rows = [1 if shape is None else shape[0] for shape in self._shapes]
            self._positions = self._whole_positions(lengths, rows)
            for row in self._positions:
                local = row.to(words.device).index_select(0, positions)
                words = combined(words, _bits(local))
        if self._tp.size() > self._sequence_ranks:  # ranks must build one tree
            words = words.contiguous()
            dist.broadcast(words, dist.get_process_group_ranks(self._tp)[0], self._tp)
        return to_host(words & torch.iinfo(torch.int64).max)

    def prepare(self, step: Step) -> None:
        """Begins a step, or begins it again: finds the rows of all segments."""
        forest, lengths = step.forest, step.forest.num_positions
        if self._ids and self._positions is None:
            self._positions = self._whole_positions(lengths, self._rows_of_calls(step))
        self._leaves.clear()
        for call in self._calls:
            call.gradients = []
        self._segments = [_rows_of(segment, lengths) for segment in forest.segments]
        self._padded = [[span.padded for span in segment.spans] for segment in forest.segments]
        if self._calls and not len(self._owner):
            self._find_places(lengths)
            every = np.unique(np.concatenate([rows for rows, _ in self._segments]))
            calls, at, samples = self._places[:, every]
            for number, call in enumerate(self._calls):
                places = at[calls == number], samples[calls == number]
                call.keep((to_device(self._device, places[0]), to_device(self._device, places[1])))

    def _find_places(self, lengths: Sequence[int]) -> None:
        """Where each position of the samples is on this rank: its call, and where in that; -1."""
        self._places = np.full((3, sum(lengths)), -1)
        parts = self._sequence_ranks * self._cp.size()
        counts = [call.numbers.numel() * parts for call in self._calls]
        self._owner = np.repeat(np.arange(len(counts)), counts)
        columns, tp = [], self._tp.rank() if self._sequence_ranks > 1 else 0
        for number, call_rows in enumerate(self._calls):
            rows, samples = call_rows.shape[:2]
            at = np.arange(rows * self._sequence_ranks) - tp * rows
            inside = (at >= 0) & (at < rows)
            table = np.stack([np.full_like(at, number), at, at])[:, None].repeat(samples, 1)
            table[2] = np.arange(samples)[:, None]
            columns.append(np.where(inside, table, -1).reshape(3, -1))
        self._places[:, self._held(lengths)] = np.concatenate(columns, axis=1)

    # Segments -------------------------------------------------------------------------------------

    def arguments(self, index: int) -> dict[str, Any]:
        """The language model's arguments for a segment, on this rank."""
        rows, own = self._segments[index]
        positions = cp_layout.held_positions(self._padded[index], self._cp.rank(), self._cp.size())
        named: dict[str, Any] = {}
        if self._positions is not None:
            named["position_ids"] = self._own_positions(rows[positions])
        if self._tokens is not None:
            named["input_ids"] = self._tokens[to_device(self._tokens.device, rows[positions])][None]
        if not self._calls:
            return named
        local = np.array_split(positions, self._sequence_ranks)[
            self._tp.rank() if self._sequence_ranks > 1 else 0
        ]
        images = self._images[rows]
        local_places = to_device(self._device, local)
        parts = [part.index_select(0, local_places) for part in self._gathered(rows, images)]
        visible, image_places = (
            to_device(self._device, images[local]),
            to_device(self._device, np.flatnonzero(images[local])),
        )
        tensors = [
            parts[0].unsqueeze(1),
            *(part.index_select(0, image_places) for part in parts[1:]),
        ]
        if torch.is_grad_enabled() and self.trains:
            tensors = [tensor.requires_grad_() for tensor in tensors]
            self._leaves[index] = Leaf(np.where(own, rows, -1), local, tensors)
        named |= {"input_ids": None, EMBEDDINGS: tensors[0]}
        if len(tensors) > 1:
            mask = visible[:, None] if self._positions_first else visible[None]
            deep = torch.stack(tensors[1:]) if self._stacked else tensors[1:]
            extra = {MASK: mask, DEEPSTACK: deep}
            named |= {BLOCK: self._block | extra} if self._in_block else extra
        return named

    def _own_positions(self, rows: Numbers) -> Tensor:
        """Positions [3, 1, positions] of rows of this rank. With context parallelism they are put
        where this rank's slice of the whole would be, as models slice their rotary tables."""
        ids = self._positions.index_select(1, to_device(self._device, rows))[:, None]  # type: ignore[union-attr]
        if (size := self._cp.size()) == 1:
            return ids
        full = ids.new_zeros((3, 1, size * len(rows)))
        slots = cp_layout.rank_positions(size * len(rows), self._cp.rank(), size)
        return full.index_copy_(2, to_device(self._device, slots), ids)

    def _gathered(self, rows: Numbers, images: Numbers) -> list[Tensor]:
        """Rows of the whole segment: embeddings, and deepstack rows where it has any image."""
        like, depth = self._calls[0], self._depth if images.any() else 0
        shape = 1 + depth, len(rows), like.shape[-1]
        gathered_rows = torch.zeros(shape, dtype=like.hidden.dtype, device=self._device)
        for call_rows, places, at, visible in self._found(rows):
            call_rows.read(gathered_rows, places, at, visible)
        return [*self._exchanged(gathered_rows)]

    def collect(self, index: int) -> None:
        """Keeps what a segment's backward has sent to its rows."""
        leaf = self._leaves.pop(index, None)
        if leaf is None:
            return
        like, images = leaf.tensors[0], self._images[self._segments[index][0]]
        row_gradients = like.new_zeros((len(leaf.tensors), len(leaf.rows), like.shape[-1]))
        for layer, tensor in enumerate(leaf.tensors):
            local = leaf.mine if layer == 0 else leaf.mine[images[leaf.mine]]
            if tensor.grad is not None:
                row_gradients[layer, to_device(row_gradients.device, local)] = tensor.grad.view(
                    -1, like.shape[-1]
                )
        row_gradients = self._exchanged(row_gradients)
        for number in self._all_calls(leaf.rows):
            self._calls[number].begin_gradients()
        for call_rows, places, at, visible in self._found(leaf.rows):
            call_rows.write(row_gradients, places, at, visible)

    def backward(self) -> None:
        """Goes on with the backward of every call, behind the language model, once."""
        for call in self._calls:
            call.backward()

    def _found(self, rows: Numbers) -> Iterator[tuple[CallRows, Places, Tensor, Tensor]]:
        """Which of some rows each call has on this rank, where, and which of these are images'."""
        calls, at, samples = np.where(rows < 0, -1, self._places[:, rows])
        for number in np.unique(calls[calls >= 0]):
            (members,) = np.nonzero(calls == number)
            places = to_device(self._device, at[members]), to_device(self._device, samples[members])
            images = np.flatnonzero(self._images[rows[members]])
            yield (
                self._calls[number],
                places,
                to_device(self._device, members),
                to_device(self._device, images),
            )

    def _all_calls(self, rows: Numbers) -> Numbers:
        """Calls that have some of the rows on any rank."""
        return np.unique(self._owner[rows[rows >= 0]])

    # Ranks ----------------------------------------------------------------------------------------

    def _held(self, lengths: Sequence[int]) -> Numbers:
        return cp_layout.held_positions(lengths, self._cp.rank(), self._cp.size())

    def _exchanged(self, rows: Tensor, how: Any = dist.ReduceOp.SUM) -> Tensor:
        """Over the ranks that share the rows of a segment: each has put in those that it holds."""
        if self._cp.size() > 1:
            dist.all_reduce(rows, how, group=self._cp)
        if self._sequence_ranks > 1:
            dist.all_reduce(rows, how, group=self._tp)
        return rows

    def _over_sequence(self, local_rows: Tensor) -> Tensor:
        return gathered(local_rows, self._tp) if self._sequence_ranks > 1 else local_rows

    def _over_cp(self, local_rows: Tensor, lengths: Sequence[int]) -> Tensor:
        """Of whole samples, one behind the other: every rank's [positions, ...]."""
        if self._cp.size() == 1:
            return local_rows
        order = to_device(local_rows.device, cp_layout.view_order(lengths, self._cp.size()))
        return gathered(local_rows, self._cp).index_select(0, order)

    def _rows_of_calls(self, step: Step) -> list[int]:
        """How many rows of samples each call has, on a stage whose calls do not say."""
        samples = np.bincount(step.microbatch_of, minlength=len(self._ids))
        return [1 if packed else int(num) for packed, num in zip(step.packed, samples, strict=True)]

    def _whole_positions(self, lengths: Sequence[int], rows: Sequence[int]) -> Tensor:
        """Positions of all samples, [3, positions]; models get whole ones, or slices.

        Args:
            rows: of each call's samples. Some models give one row's positions for all of them.
        """
        pairs = zip(map(_three, self._ids), rows, strict=True)
        every = [ids.expand(-1, num, -1) if ids.shape[1] == 1 else ids for ids, num in pairs]
        ids = torch.cat([ids.flatten(1) for ids in every], 1).to(self._device)
        if ids.shape[1] == sum(lengths):
            return ids
        if ids.shape[1] * self._cp.size() != sum(lengths):
            raise refused(NO_POSITION_IDS)
        return self._over_cp(ids.T.contiguous(), lengths).T.contiguous()


def chunk_rows(calls: Sequence[ModelCall], rank: Rank, chunk: int) -> ChunkRows | None:
    """What the calls of a model chunk have instead of tokens; None if nothing.

    Raises:
        CannotShare: the model needs positions, and a call has none; or it packs rows inside.
    """
    model = rank.language_models[chunk]
    multimodal = has_mrope(model)
    if not calls or not (multimodal or calls[0][EMBEDDINGS] is not None):
        return None
    if calls_parent(model) and any(call["packed_seq_params"] for call in calls):
        raise refused(PACKS_INSIDE, type(model).__name__)
    return ChunkRows(calls, rank, chunk)


def _rows_of(segment: Any, lengths: Sequence[int]) -> tuple[Numbers, Numbers]:
    """Which positions of all samples, one behind the other, a segment is computed from, and whether
    each is its own: padding goes on with its span's last one, and a filler has none."""
    offsets, rows, own = np.cumsum([0, *lengths]), [], []
    for span in segment.spans:
        steps = np.arange(span.padded)
        start = offsets[span.rollouts[0]] + span.start if span.rollouts else 0
        rows.append(start + np.minimum(steps, max(span.length - 1, 0)) * bool(span.rollouts))
        own.append((steps < span.length) & bool(span.rollouts))
    return np.concatenate(rows), np.concatenate(own)


def _bits(positions: Tensor) -> Tensor:
    """Numbers that are equal where positions are, int64; some models count in fractions."""
    fractions = positions.is_floating_point()
    return positions.double().view(torch.int64) if fractions else positions


def _three(ids: Tensor) -> Tensor:
    """Positions [3, samples, positions]; some models are given one row of text."""
    return ids if ids.dim() == 3 else ids[None].expand(3, -1, -1)
