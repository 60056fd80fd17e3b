"""What layers tell while their graphs are made: once to see what they run, then piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_prefix.features.graphs.cut_layer import OTHER_LAYER, Core, CutLayer, UnroutedPart
from megatron_prefix.features.graphs.pieces import CannotCaptureError, Piece, forked, put_at, used

if TYPE_CHECKING:
    from megatron_prefix.features.graphs.segment_graphs import SegmentGraphs


ALL_LAYERS = -1
"""In the name of a place: it is that of every layer."""


class Rehearsal:
    """A cut with nothing captured; see Cut.

    Attributes:
        made: what the layer has made in front of cuts.
    """

    def __init__(self, graphs: SegmentGraphs, layer: CutLayer) -> None:
        self._graphs, self._layer = graphs, layer
        self.made: list[Tensor] = []

    def core(
        self,
        run: Core,
        inputs: Sequence[Tensor],
        shape: Sequence[int],
        passing: Sequence[Tensor] = (),
    ) -> Tensor:
        """See Cut."""
        if self._graphs.has_inside(self._layer):
            return self._graphs.mixed(run, [*inputs, *passing])
        computed = [*inputs, *passing]
        self.made += computed
        return computed[0].new_zeros(shape).requires_grad_()

    def entering(self, hidden: Tensor) -> Tensor:
        """See Cut."""
        return hidden

    def experts(
        self, hidden: Tensor, norm: Callable[[Tensor], Any], unrouted: Sequence[UnroutedPart]
    ) -> Tensor:
        """See Cut."""
        if isinstance(normed := norm(hidden), Tensor):
            self.made += [normed, *(part.run(normed) for part in unrouted)]
        return hidden


class GraphCapture:
    """The forward of a layer, or of several whole layers that are one launch; see Cut.

    Args:
        graphs: that it is one of.
        layers: in the order in which they run.
        x: what the first is given.

    Attributes:
        pieces, cores: see Sides.
    """

    def __init__(self, graphs: SegmentGraphs, layers: Sequence[CutLayer], x: Tensor) -> None:
        self._graphs, self._layer, self._last, self._x = graphs, layers[0], layers[-1], x
        self._enters = x
        self._has_core = len(layers) > 1 or graphs.has_inside(self._layer)
        self.pieces, self.cores = list[Piece](), list[Core]()
        self._runs: Piece | None = None
        self._inputs: list[Tensor] = [self._enters]
        self._nodes: dict[Any, Piece] = {}
        self._rest: Tensor | None = None

    def begin(self) -> None:
        """Begins a piece."""
        is_first = not (self.pieces or self._layer.follows)
        self._runs = Piece(self._graphs.pool, is_first)
        self.pieces.append(self._runs)
        self._runs.forward.begin()

    def core(
        self,
        run: Core,
        inputs: Sequence[Tensor],
        shape: Sequence[int],
        passing: Sequence[Tensor] = (),
    ) -> Tensor:
        """See Cut."""
        if self._has_core:
            return self._graphs.mixed(run, [*inputs, *passing])
        core_index = self._layer.number, len(self.cores)
        names: list[Any] = [("made", core_index, number) for number in range(len(inputs))]
        names += [
            ("passing", number, self._graphs.a_position(tensor))
            for number, tensor in enumerate(passing)
        ]
        computed = [*inputs, *passing]
        places = [self._graphs.place_of(*pair) for pair in zip(names, computed, strict=True)]
        self._end(computed, places, [] if self.cores else [self._enters])
        mixed = self._graphs.place(("mixed", core_index), computed[0], shape=shape).requires_grad_()
        self.cores.append(run)
        self._inputs = [mixed]
        self.begin()
        return mixed

    def entering(self, hidden: Tensor) -> Tensor:
        """See Cut."""
        if hidden is not self._x or not self._layer.mixes or self._has_core:
            return hidden
        # A leaf of its own: what is behind the core is differentiated apart from it.
        self._enters = hidden.detach().requires_grad_()
        self._inputs = [self._enters]
        return self._enters

    def experts(
        self, hidden: Tensor, norm: Callable[[Tensor], Any], unrouted: Sequence[UnroutedPart]
    ) -> Tensor:
        """See Cut. The norm keeps its input, and so does whoever adds it to what experts make: it
        is put in its place before. What nobody keeps has one place for all layers."""
        place = self._graphs.place_of(("residual", self._layer.number), hidden)
        if place.data_ptr() != hidden.data_ptr():
            hidden = put_at(place, hidden)
        computed, places = [hidden], [place]
        if isinstance(normed := norm(hidden), Tensor) and normed is not hidden:
            normed, *given = forked(normed, 1 + len(unrouted))
            computed.append(normed)
            places.append(self._graphs.place_of(("normed", self._layer.number), normed))
            for part, x in zip(unrouted, given, strict=True):
                if part.can_wait and self._runs is not None:
                    self._runs.leave_rest(computed, places)
                computed.append(part.run(x))
                number = self._layer.number if part.is_kept else ALL_LAYERS
                places.append(self._graphs.place_of((part.method, number), computed[-1]))
        self._rest = hidden.detach()
        self._end_last(computed, places)
        return self._rest

    def end(self, y: Tensor) -> None:
        """Ends with what the layer gives.

        Raises:
            CannotCaptureError: not all that the layer has run is in its graphs.
        """
        if self._rest is None:
            self._end_last([y], [self._graphs.place_of(("hidden", self._last.number + 1), y)])
        elif y is not self._rest:
            raise CannotCaptureError(OTHER_LAYER)

    def _end_last(self, computed: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        if (self._layer.mixes and not self._has_core) != bool(self.cores):
            raise CannotCaptureError("a layer does not call its core")
        if self.cores:
            self._inputs.append(self._x)
        self._end(computed, places)

    def _end(
        self, computed: Sequence[Tensor], places: Sequence[Tensor], passed: Sequence[Tensor] = ()
    ) -> None:  # fmt: skip
        piece = self.pieces[-1]
        piece.end(self._inputs, computed, places, passed)
        self._runs = None
        result = used(computed, self._inputs, self._nodes)
        self._nodes |= dict.fromkeys(result.nodes, piece)
        self._graphs.uses(piece, result)

    def abandon(self) -> None:
        """Ends the capture that runs, if one does."""
        if self._runs is not None:
            self._runs.abandon()
