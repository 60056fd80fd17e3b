"""Graphs of one segment at a time, and their capture.

What is before a layer's core attention (norm, projection, rotary embedding) and behind it
(projection, residual connections, MLP) is the same work for all segments of a length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_prefix.device import graphs
from megatron_prefix.layers.blocks.rotary import Rotary
from megatron_prefix.layers.graphs.cut_layer import OTHER_LAYER, CutLayer, Cuts, Sides
from megatron_prefix.layers.graphs.pieces import (
    CannotCaptureError,
    Piece,
    put_at,
    stand_ins,
    used,
)

ROTARY = "rotary_pos_emb"
_IGNORED = "attention_mask"
_NAMES = ("query", "key", "value")
_GRADIENT = "gradient of hidden states"
_OUTPUTS = _GRADIENT, "gradient of normed"


class SegmentGraphs:
    """Graphs of some layers for one segment at a time, of any length up to that of the first.

    Args:
        layers: the layers.
        owner: what its `cut` is layers call while they are captured.
        rotary: tables of rotary embeddings that layers ask for.

    Attributes:
        pool: of its graphs.
        most: positions of the first segment on this rank; longer ones have no place.
        made: the graphs of every layer, by positions of a segment on this rank.
    """

    def __init__(self, layers: Sequence[CutLayer], most: int, owner: Cuts, rotary: Rotary) -> None:
        self._layers, self._owner, self._rotary = layers, owner, rotary
        self.most = most
        self.pool = graphs.pool()
        self._places: dict[Any, Tensor] = {}
        self._tables: set[int] = set()
        self._owners: Mapping[int, nn.Parameter] = {}
        self._kept: list[Tensor] = []
        self.made: dict[int, list[Sides]] = {}

    def begin(self, given: Mapping[str, Any], positions: Tensor) -> None:
        """Takes what a segment's layers are given besides hidden states, and what they ask for, of
        its positions."""
        if (turned := given.get(ROTARY)) is not None:
            self.place(ROTARY, turned).copy_(turned)
        for name in self._tables:
            rows = self._rotary.rows(name, positions)
            self.place((ROTARY, name), rows).copy_(rows)

    def capture(self, hidden: Tensor, given: Mapping[str, Any]) -> None:
        """Makes the graphs of a length.

        Args:
            hidden: [positions, 1, hidden_size], like the hidden states of a segment.
            given: what else layers are given.

        Raises:
            CannotCaptureError: the layers do what no graph can.
            RuntimeError: so says CUDA.
        """
        arguments = self._arguments(given)
        self._tables.clear()
        graphs.settle()
        every = range(len(self._layers))
        inside = (one for layer in self._layers for one in layer.modules())
        with graphs.apart(), stand_ins(inside) as self._owners:
            try:
                self._rotary.placed = self._placed
                for number in every:
                    self._rehearse(number, hidden, arguments)
                graphs.settle()
                made = [self._forward(number, hidden, arguments) for number in every]
                for sides in reversed(made):
                    self._backward(sides)
            finally:
                self._rotary.placed = self._owner.cut = None
                self._owners = {}
        self._kept += _shared_buffers()
        self.made[len(hidden)] = made

    def _arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        arguments = dict(given)
        for name, value in given.items():
            if name == ROTARY and isinstance(value, Tensor):
                arguments[name] = self.place(ROTARY, value)
                arguments[name].copy_(value)
            elif name == _IGNORED:
                arguments[name] = None
            elif not isinstance(value, bool | int | float | str | None):
                raise CannotCaptureError(f"layers are given {name}")
        return arguments

    def _placed(self, name: int, rows: Tensor) -> Tensor:
        """Where layers read a table; it is filled while they rehearse."""
        place = self.place((ROTARY, name), rows)
        if name not in self._tables:
            self._tables.add(name)
            place.copy_(rows)
        return place

    def place(self, name: Any, like: Tensor, *, shape: Sequence[int] | None = None) -> Tensor:
        """The place of what has a name, as many rows of it as `like` has; the first is the longest.

        Hidden states of sequence-parallel ranks have fewer rows than queries.
        """
        key = name, like.dtype
        if key not in self._places:
            rest = like.shape[1:] if shape is None else shape
            self._places[key] = like.new_empty((len(like), *rest), requires_grad=False)
        return self._places[key][: len(like)].detach()

    def place_of(self, name: Any, computed: Tensor) -> Tensor:
        """The place of what a piece computes: that itself where there is none yet, so that the
        longest segment's pieces copy nothing there."""
        key, storage = (name, computed.dtype), computed.untyped_storage()
        whole = computed.is_contiguous() and storage.nbytes() == computed.nbytes
        if key not in self._places and whole:
            self._places[key] = computed.detach()
        return self.place(name, computed)

    def _rehearse(self, number: int, hidden: Tensor, given: Mapping[str, Any]) -> None:
        """Runs a layer on the stream of captures: what is loaded or allocated once is then there.
        All gradients are zero, so main gradients do not change."""
        x, rehearsal = torch.zeros_like(hidden).requires_grad_(), _Rehearsal()
        self._owner.cut = rehearsal
        outputs = [self._layer(number, x, given), *rehearsal.made]
        leaves = [one for one in self._layers[number].parameters() if one.requires_grad]
        zeros = [torch.zeros_like(one) for one in outputs]
        torch.autograd.grad(outputs, [x, *leaves], zeros, allow_unused=True)

    def _layer(self, number: int, x: Tensor, given: Mapping[str, Any]) -> Tensor:
        outputs = self._layers[number].stock(hidden_states=x, **given)
        if not isinstance(outputs, tuple) or not isinstance(outputs[0], Tensor):
            raise CannotCaptureError(OTHER_LAYER)
        y, *more = outputs
        if any(one is not None for one in more):
            raise CannotCaptureError("a layer gives more than hidden states")
        return y

    def _forward(self, number: int, hidden: Tensor, given: Mapping[str, Any]) -> Sides:
        """Captures a layer's forward, in two pieces."""
        x = self.place(("hidden", number), hidden).requires_grad_()
        capture = _Capture(self, number, x)
        self._owner.cut = capture
        capture.before.forward.begin()
        try:
            y = self._layer(number, x, given)
            capture.end(y)
        except BaseException:
            capture.abandon()
            raise
        return Sides(capture.before, capture.behind)

    def uses(self, piece: Piece, parameters: Sequence[nn.Parameter]) -> None:
        """See Piece; while layers are captured."""
        piece.uses(parameters, self._owners)

    def _backward(self, sides: Sides) -> None:
        before, behind = sides
        mixed, x = behind.inputs
        # A gradient of hidden states is where the piece that comes next in the backward reads it.
        hidden = self.place(_GRADIENT, x)
        behind.capture_backward(
            [self.place(*both) for both in zip(_OUTPUTS, behind.outputs, strict=False)],
            [self.place("gradient of mixed", mixed), hidden],
        )
        *made, _ = before.outputs
        gradients = [self.place(("gradient", number), one) for number, one in enumerate(made)]
        before.capture_backward([*gradients, hidden], [hidden])


class _Rehearsal:
    """A cut with nothing captured; see Cut.

    Attributes:
        made: what the layer has made in front of cuts.
    """

    def __init__(self) -> None:
        self.made: list[Tensor] = []

    def attention(self, query: Tensor, key: Tensor, value: Tensor, *crossing: Tensor) -> Tensor:
        """See Cut."""
        self.made += (query, key, value, *crossing)
        return query.new_zeros(_mixed(query, value)).requires_grad_()

    def experts(self, hidden: Tensor, norm: Callable[[Tensor], Any]) -> Tensor:
        """See Cut."""
        if isinstance(normed := norm(hidden), Tensor):
            self.made.append(normed)
        return hidden


class _Capture:
    """One layer's forward; see Cut.

    Args:
        graphs: that it is one of.
        number: of the layer.
        x: what the layer is given.
    """

    def __init__(self, graphs: SegmentGraphs, number: int, x: Tensor) -> None:
        self._graphs, self._number, self._x = graphs, number, x
        self.before, self.behind = Piece(graphs.pool, is_first=number == 0), Piece(graphs.pool)
        self._runs: Piece | None = self.before
        self._nodes: set[Any] = set()
        self._mixed: Tensor | None = None
        self._rest: Tensor | None = None

    def attention(self, *computed: Tensor) -> Tensor:
        """See Cut."""
        names: list[Any] = [(name, self._number) for name in _NAMES]
        names += [("crossing", number) for number in range(len(computed) - len(names))]
        places = [self._graphs.place_of(*both) for both in zip(names, computed, strict=True)]
        self.before.end([self._x], computed, places, [self._x])
        self._runs = None
        parameters, self._nodes = used(computed, [self._x], set())
        self._graphs.uses(self.before, parameters)
        query, _, value, *_ = computed
        shape = _mixed(query, value)[1:]
        self._mixed = self._graphs.place(("mixed", self._number), query, shape=shape)
        self._mixed.requires_grad_()
        self.behind.forward.begin()
        self._runs = self.behind
        return self._mixed

    def experts(self, hidden: Tensor, norm: Callable[[Tensor], Any]) -> Tensor:
        """See Cut. The norm keeps its input, and so does whoever adds it to what experts make: it
        is put in its place before."""
        place = self._graphs.place_of(("residual", self._number), hidden)
        if place.data_ptr() != hidden.data_ptr():
            hidden = put_at(place, hidden)
        computed, places = [hidden], [place]
        if isinstance(normed := norm(hidden), Tensor) and normed is not hidden:
            computed.append(normed)
            places.append(self._graphs.place_of(("normed", self._number), normed))
        self._rest = hidden.detach()
        self._end(computed, places)
        return self._rest

    def end(self, y: Tensor) -> None:
        """Ends with what the layer gives.

        Raises:
            CannotCaptureError: not all that the layer has run is in its graphs.
        """
        if self._rest is None:
            self._end([y], [self._graphs.place_of(("hidden", self._number + 1), y)])
        elif y is not self._rest:
            raise CannotCaptureError(OTHER_LAYER)

    def _end(self, computed: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        if self._mixed is None:
            raise CannotCaptureError("a layer does not call its core attention")
        inputs = [self._mixed, self._x]
        self.behind.end(inputs, computed, places)
        self._runs = None
        self._graphs.uses(self.behind, used(computed, inputs, self._nodes)[0])

    def abandon(self) -> None:
        """Ends the capture that runs, if one does."""
        if self._runs is not None:
            self._runs.forward.abandon()


def _shared_buffers() -> list[Tensor]:
    """Where Megatron's own layers gather what sequence-parallel ranks have (GlobalMemoryBuffer in
    megatron/core/utils.py): a longer segment gets another one, and graphs go on using this."""
    from megatron.core.parallel_state import get_global_memory_buffer

    return [*get_global_memory_buffer().buffer.values()]


def _mixed(query: Tensor, value: Tensor) -> tuple[int, int, int]:
    """The shape of core attention's output: [positions, 1, heads * value_dim]."""
    return len(query), 1, query.shape[2] * value.shape[3]
