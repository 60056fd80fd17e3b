"""Graphs of one segment at a time, and their capture.

What is before the core of a layer's mixer (norm, projection, rotary embedding) and behind it
(projection, residual connections, MLP) is the same work for all segments of a length.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_prefix.features.graphs import cuda
from megatron_prefix.features.graphs.capture import GraphCapture, Rehearsal
from megatron_prefix.features.graphs.cut_layer import Core, CutLayer, Cuts, Sides
from megatron_prefix.features.graphs.pieces import Piece, Used, stand_ins
from megatron_prefix.features.graphs.placed import PlacedContext, PlacedForm, Sheet
from megatron_prefix.features.graphs.placed_arenas import PlacedArenas
from megatron_prefix.layers.blocks.rotary import Rotary
from megatron_prefix.layers.segment import SegmentContext

ROTARY = "rotary_pos_emb"
_IGNORED = "attention_mask"
_GRADIENT = "gradient of hidden states"


class GraphForm(NamedTuple):
    """What segments have in common whose graphs are the same.

    Attributes:
        positions: on this rank.
        taps_mlps: whether MLPs run otherwise than by their forward (`Running.mlp_tap`).
        placed: of mixers inside of graphs; None: they are cut at their cores.
        chained: whether consecutive whole layers are one launch.
    """

    positions: int
    taps_mlps: bool = False
    placed: PlacedForm | None = None
    chained: bool = False

    @property
    def num_keys(self) -> int:
        """Of ancestors, padding included."""
        return sum(level.keys for level in self.placed.levels) if self.placed else 0

    def covers(self, other: GraphForm) -> bool:
        """Whether segments of another form can use this one's graphs: as many runs and keys, or
        some more that are empty."""
        if self._replace(placed=None) != other._replace(placed=None):
            return False
        if self.placed is None or other.placed is None:
            return self.placed is other.placed
        return self.placed.covers(other.placed)


class SegmentGraphs:
    """Graphs of some layers for one segment at a time, of any length up to `most`.

    Args:
        layers: the layers.
        most: see below.
        owner: what its `cut` is layers call while they are captured.
        rotary: tables of rotary embeddings that layers ask for.
        passes: whether they are for segments that soon give them back: waves, and what runs again.

    Attributes:
        layers, passes: as given.
        pool: of its graphs.
        most: positions of the longest segment on this rank that has a place.
        made: the graphs of every layer by its number, by a segment's form.
        form: of the segment that has these graphs, or had them last.
        at: the layer whose graphs are captured, or were last; None before the first.
    """

    def __init__(
        self,
        layers: Sequence[CutLayer],
        most: int,
        owner: Cuts,
        rotary: Rotary,
        arenas: PlacedArenas,
        *,
        passes: bool = False,
    ) -> None:
        self.layers, self._owner, self._rotary = layers, owner, rotary
        self._arenas, self.form = arenas, GraphForm(most)
        self._sheets: dict[PlacedForm, Sheet] = {}
        self._context: PlacedContext | None = None
        self.at: CutLayer | None = None
        self.most, self._length, self.passes = most, most, passes
        self.pool = cuda.pool()
        self._places: dict[Any, Tensor] = {}
        self._tables: set[int] = set()
        self._owners: Mapping[int, nn.Parameter] = {}
        self._kept: list[Tensor] = []
        self.made: dict[GraphForm, dict[int, Sides]] = {}

    def longest(self, *, taps_mlps: bool) -> int:
        """Positions of the longest form whose MLPs run otherwise than by their forward, or of
        another; 0 without one."""
        return max((f.positions for f in self.made if f.taps_mlps == taps_mlps), default=0)

    def covering(self, form: GraphForm) -> GraphForm | None:
        """The form whose graphs a segment of `form` can use: of those made the one with fewest
        keys; None without one."""
        covers = [made for made in self.made if made.covers(form)]
        return min(covers, key=lambda made: made.num_keys, default=None)

    def begin(self, arguments: Mapping[str, Any], context: SegmentContext) -> None:
        """Copies a segment's rotary embeddings, the rows that its layers look up at its positions,
        and what its mixers see, into the buffers that its graphs read."""
        positions = context.positions
        if self.form.placed is not None:
            self._sheets[self.form.placed].of_segment(context, self._arenas.capacity)
        if (turned := arguments.get(ROTARY)) is not None:
            self.place(ROTARY, turned).copy_(turned)
        for name in self._tables:
            rows = self._rotary.rows(name, positions)
            self.place((ROTARY, name), rows).copy_(rows)

    def capture(self, form: GraphForm, hidden: Tensor, kwargs: Mapping[str, Any]) -> float:
        """Makes the graphs of a form, that of the segment that runs.

        Args:
            form: that.
            hidden: [positions, 1, hidden_size], like the hidden states of a segment.
            kwargs: the layers' other arguments.

        Returns:
            Seconds, without those in which the device did what was under way.

        Raises:
            CannotCaptureError: the layers do what no graph can.
            RuntimeError: so says CUDA.
        """
        self._length, self.form = len(hidden), form
        arguments = self._arguments(kwargs)
        self._context = self._blank(hidden.device)
        self._tables.clear()
        cuda.settle()
        start = time.perf_counter()
        inside = (module for layer in self.layers for module in layer.modules())
        known = self._context.known() if self._context else contextlib.nullcontext()
        with cuda.apart(), known, stand_ins(inside) as self._owners:
            try:
                self._rotary.placed = self._placed
                for layer in self.layers:
                    self._rehearse(layer, hidden, arguments)
                cuda.settle()
                chains = [*self._chains()]
                created = [self._forward(layers, hidden, arguments) for layers in chains]
                for layers, sides in reversed([*zip(chains, created, strict=True)]):
                    self._backward(layers[0], sides)
            finally:
                self._rotary.placed = self._owner.cut = None
                self._owners = {}
        self._kept += _shared_buffers()
        self.made[form] = {layer.number: Sides() for layer in self.layers}
        self.made[form] |= {
            first.number: sides for (first, *_), sides in zip(chains, created, strict=True)
        }
        return time.perf_counter() - start

    def _chains(self) -> Iterator[list[CutLayer]]:
        """The layers, those that are one launch together."""
        chain: list[CutLayer] = []
        for layer in self.layers:
            both = chain and self._is_whole(chain[-1]) and self._is_whole(layer)
            if not (both and layer.follows and self.form.chained) and chain:
                yield chain
                chain = []
            chain.append(layer)
        yield chain

    def _is_whole(self, layer: CutLayer) -> bool:
        return not layer.has_experts and (self.has_inside(layer) or not layer.mixes)

    def _blank(self, device: torch.device) -> PlacedContext | None:
        """A segment of the form, as mixers see it while it is captured."""
        form = self.form.placed
        if form is None:
            return None
        sheet = self._sheets.setdefault(form, Sheet(form, device))
        sheet.of_none(self._arenas.capacity)
        return PlacedContext.of(sheet, self._arenas)

    def has_inside(self, layer: CutLayer) -> bool:
        """Whether a layer's core is in its graphs."""
        return self._context is not None and layer.inside is not None

    def mixed(self, run: Core, inputs: Sequence[Tensor]) -> Tensor:
        """What a core makes of what it is given, as of a segment of the form."""
        if self._context is None:
            raise RuntimeError("graphs are cut at cores")
        with self._owner.attending(self._context):
            return run(*inputs, into=None)

    def _arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Tensor | None]:
        """Tensors that layers take besides hidden states, copied into the graphs' buffers."""
        arguments: dict[str, Tensor | None] = {_IGNORED: None}
        if (turned := kwargs.get(ROTARY)) is not None:
            place = arguments[ROTARY] = self.place(ROTARY, turned)
            place.copy_(turned)
        return arguments

    def _placed(self, name: int, rows: Tensor) -> Tensor:
        """Where layers read a table; it is filled while they rehearse."""
        place = self.place((ROTARY, name), rows)
        if name not in self._tables:
            self._tables.add(name)
            place.copy_(rows)
        return place

    def place(self, name: Any, like: Tensor, *, shape: Sequence[int] | None = None) -> Tensor:
        """The place of what has a name, with the shape of `like` or another: the beginning of that
        of the longest segment."""
        key, shape = (name, like.dtype), like.shape if shape is None else shape
        size = math.prod(shape)
        if key not in self._places:
            longest = -(-size // self._length) * self.most
            self._places[key] = like.new_empty(longest, requires_grad=False)
        return self._places[key][:size].view(*shape).detach()

    def place_of(self, name: Any, computed: Tensor) -> Tensor:
        """The place of what a piece computes: that itself where there is none yet, so that the
        longest segment's pieces copy nothing there."""
        key, storage = (name, computed.dtype), computed.untyped_storage()
        owns_storage = computed.is_contiguous() and storage.nbytes() == computed.nbytes
        is_longest = self._length == self.most
        if key not in self._places and owns_storage and is_longest:
            self._places[key] = computed.detach().view(-1)
        return self.place(name, computed)

    @property
    def placed_bytes(self) -> int:
        """Bytes of its places."""
        storages = [place.untyped_storage() for place in self._places.values()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def _rehearse(self, layer: CutLayer, hidden: Tensor, arguments: Mapping[str, Any]) -> None:
        """Runs a layer on the stream of captures: what is loaded or allocated once is then there.
        All gradients are zero, so main gradients do not change."""
        x, rehearsal = torch.zeros_like(hidden).requires_grad_(), Rehearsal(self, layer)
        self.at = layer
        self._owner.cut = rehearsal
        outputs = [layer.captured(x, arguments), *rehearsal.made]
        leaves = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        zeros = [torch.zeros_like(output) for output in outputs]
        torch.autograd.grad(outputs, [x, *leaves], zeros, allow_unused=True)

    def _forward(
        self, layers: Sequence[CutLayer], hidden: Tensor, arguments: Mapping[str, Any]
    ) -> Sides:
        """Captures the forward of a layer, in pieces, or of a chain, in one."""
        y = x = self.place(("hidden", layers[0].number), hidden).requires_grad_()
        inside, capture = list[int](), GraphCapture(self, layers, x)
        self._owner.cut = capture
        capture.begin()
        try:
            for layer in layers:
                self.at = layer
                y = layer.captured(y, arguments)
                if self._context is not None and layer.inside:
                    inside.append(self._context.layer)
            capture.end(y)
        except BaseException:
            capture.abandon()
            raise
        return Sides(capture.pieces, capture.cores, inside)

    def uses(self, piece: Piece, usage: Used) -> None:
        """See Piece; while layers are captured."""
        piece.uses(usage.parameters, self._owners, usage.borrowed)

    def _backward(self, layer: CutLayer, sides: Sides) -> None:
        """Captures a layer's backward."""
        self.at = layer
        first, last = sides.pieces[0], sides.pieces[-1]
        # A gradient of hidden states is where the piece that comes next in the backward reads it.
        hidden = self.place(_GRADIENT, first.inputs[0])
        y, *others = last.outputs
        gradients = [self.place(_GRADIENT, y)]
        gradients += (self._of(("output", n), output) for n, output in enumerate(others))
        for before, piece in reversed([*itertools.pairwise(sides.pieces)]):
            mixed, *passed = piece.inputs
            of_mixed = self._of("mixed", mixed)
            piece.capture_backward(gradients, [of_mixed, *(hidden for _ in passed)])
            created = before.outputs[:-1] if before is first else before.outputs
            gradients = [self._of(*pair) for pair in enumerate(created)]
        if first is not last:
            gradients.append(hidden)
        first.capture_backward(gradients, [hidden])

    def _of(self, name: Any, like: Tensor) -> Tensor:
        """A place of a gradient, which layers share where it has as many numbers a position."""
        return self.place(("gradient", name, self.a_position(like)), like)

    def a_position(self, tensor: Tensor) -> int:
        """Numbers of a tensor for one of the hidden states that are captured."""
        return tensor.numel() // self._length


def _shared_buffers() -> list[Tensor]:
    """Where Megatron's own layers gather what sequence-parallel ranks have (GlobalMemoryBuffer in
    megatron/core/utils.py): a longer segment gets another one, and graphs go on using this."""
    from megatron.core.parallel_state import get_global_memory_buffer

    return [*get_global_memory_buffer().buffer.values()]
