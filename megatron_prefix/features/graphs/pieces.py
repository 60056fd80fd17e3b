"""A piece of a layer that is captured once and replayed: what is before its core, or behind.

A piece has a graph of its forward and one of its backward.  They read and write tensors that have
their places for good; what is given is copied there, unless it is there already.  All else that
they use is in a pool, in which what is captured later lies where what was captured earlier has
ended.  So the pieces of a segment are replayed in the order in which they were captured: forwards,
then backwards, the last first.

What a piece computes and a later one of its layer reads, past the core (the gate on attention's
output), stays where it is, and so does its gradient on the way back: the later piece borrows it.

Gradients of weights that products add to main gradients themselves
(`gradient_accumulation_fusion`) are added by a replay as well.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_prefix.features.graphs import cuda
from megatron_prefix.layers.own_backward import with_backward

SMALL = 2**20
"""Numbers of the largest parameter, of a norm, bias or router, whose gradient is handed on by a
copy. Products add larger ones to main gradients, or the layer is not captured."""
_ADDED = "grad_added_to_main_grad"


class CannotCaptureError(Exception):
    """What a layer runs cannot be captured; the message says why."""


class Piece:
    """Graphs of one piece, for one number of positions.

    Args:
        pool: of the segment's pieces.
        is_first: whether gradients of its inputs go to others than pieces, who may keep them.

    Attributes:
        forward, backward: the graphs.
        rest: what its forward leaves for later, if it does: the last of its outputs are not there
            until this is replayed.
        inputs: the tensors that its forward reads.
        outputs: those that it writes, and behind them what it passes on.
    """

    def __init__(self, pool: Any, is_first: bool = False) -> None:
        self.forward, self.backward = cuda.Graph(pool), cuda.Graph(pool)
        self.rest: cuda.Graph | None = None
        self._pool, self._num_early = pool, 0
        self._is_first = is_first
        self.inputs: tuple[Tensor, ...] = ()
        self.outputs: tuple[Tensor, ...] = ()
        # In autograd's graph, until that is captured; their tensors are copied and need not stay.
        self._computed: tuple[GradientEdge, ...] = ()
        self._leaves: tuple[nn.Parameter, ...] = ()
        self._gradients: tuple[Tensor, ...] = ()
        self._input_gradients: tuple[Tensor, ...] = ()
        self._parameters: tuple[nn.Parameter, ...] = ()
        self._of_parameters: tuple[Tensor | None, ...] = ()
        self._added: tuple[nn.Parameter, ...] = ()
        self._own: dict[nn.Parameter, Tensor] = {}
        self._borrowed: list[tuple[Piece, GradientEdge]] = []
        self._lent: list[tuple[GradientEdge, Tensor]] = []  # with gradients, once they are there

    def leave_rest(self, computed: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        """Captures apart what follows, which can wait.

        Args:
            computed: so far.
            places: where it writes these.
        """
        _fill(places, computed)
        self.forward.end()
        self._num_early = len(places)
        self.rest = cuda.Graph(self._pool)
        self.rest.begin()

    def end(
        self, inputs: Sequence[Tensor], computed: Sequence[Tensor], places: Sequence[Tensor],
        passed: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        """Ends the capture of its forward.

        Args:
            inputs: leaves that it has read.
            computed: from them.
            places: where it writes these.
            passed: the first input, if it passes that on.
        """
        _fill(places[self._num_early :], computed[self._num_early :])
        (self.rest or self.forward).end()
        self._computed = tuple(map(get_gradient_edge, computed))
        self.inputs, self.outputs = (*inputs,), (*places, *passed)

    def abandon(self) -> None:
        """Ends the capture of its forward, which has failed."""
        (self.rest or self.forward).abandon()

    def uses(
        self,
        leaves: Sequence[nn.Parameter],
        owners: Mapping[int, nn.Parameter],
        borrowed: Iterable[tuple[Piece, GradientEdge]] = (),
    ) -> None:
        """Says what parameters it uses, by their stand-ins, and what of earlier pieces; outside of
        a capture.

        Raises:
            CannotCaptureError: it uses something trained that is in no module of the layer.
        """
        self._borrowed = [*borrowed]
        if any(id(leaf) not in owners for leaf in leaves):
            raise CannotCaptureError("a layer uses a parameter that no module of it has")
        self._leaves = tuple(leaves)
        self._parameters = tuple(owners[id(leaf)] for leaf in leaves)
        small = (parameter for parameter in self._parameters if parameter.numel() <= SMALL)
        self._own = {leaf: torch.empty_like(leaf) for leaf in small}

    def capture_backward(self, gradients: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        """Captures its backward; nothing of autograd's graph is left then.

        Args:
            gradients: where those of its outputs will be.
            places: where it writes those of its inputs; the first may be where that of what it
                passes on will be.
        """
        requested: Any = [*self.inputs, *self._leaves, *(edge for _, edge in self._borrowed)]
        with self.backward.captured():
            computed, passed = gradients[: len(self._computed)], gradients[len(self._computed) :]
            edges: Any = [*self._computed, *(edge for edge, _ in self._lent)]
            provided = [*computed, *(gradient for _, gradient in self._lent)]
            results = iter(torch.autograd.grad(edges, requested, provided, allow_unused=True))
            of_inputs = [next(results) for _ in self.inputs]
            of_parameters = [next(results) for _ in self._leaves]
            self._give_back(results, (*gradients, *places))
            for place, *parts in itertools.zip_longest(places, of_inputs, passed):
                _put_sum(place, [part for part in parts if part is not None])
            self._of_parameters = tuple(map(self._handed_on, self._leaves, of_parameters))
        self._added = tuple(
            parameter
            for parameter, leaf in zip(self._parameters, self._leaves, strict=True)
            if getattr(leaf, _ADDED, False)
        )
        self._computed = self._leaves = ()
        self._borrowed, self._lent = [], []
        self._gradients, self._input_gradients = (*gradients,), (*places,)

    def _give_back(self, gradients: Iterable[Tensor | None], places: Iterable[Tensor]) -> None:
        """Hands gradients of what is borrowed to whom it belongs, whose backward is captured
        later; copies of those that are where others will write."""
        written = {place.untyped_storage().data_ptr() for place in places}
        for (lender, edge), gradient in zip(self._borrowed, gradients, strict=True):
            if gradient is not None:
                is_overwritten = gradient.untyped_storage().data_ptr() in written
                lender._lent.append((edge, gradient.clone() if is_overwritten else gradient))

    def _handed_on(self, leaf: nn.Parameter, gradient: Tensor | None) -> Tensor | None:
        """Where a parameter's gradient is after a replay; of one that the product has added, what
        takes its place."""
        if gradient is None or getattr(leaf, _ADDED, False):
            return gradient
        parameter = self._parameters[[*map(id, self._leaves)].index(id(leaf))]
        if parameter not in self._own:
            raise CannotCaptureError("a product does not add its weight's gradient to main_grad")
        _fill([self._own[parameter]], [gradient])
        return self._own[parameter]

    def __call__(self, *inputs: Tensor, left: Callable[[], None] | None = None) -> Sequence[Tensor]:
        """Its outputs, from its inputs; `left` is called behind its backward."""
        created: Sequence[Tensor] = _Replayed.apply(
            self, left, len(inputs), *inputs, *self._parameters
        )
        return created

    def run_forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Replays its forward, but for what can wait."""
        _fill(self.inputs, inputs)
        self.forward.replay()
        return tuple(output.detach() for output in self.outputs)

    def run_backward(self, gradients: Sequence[Tensor]) -> Iterator[Tensor | None]:
        """Replays its backward: gradients of inputs and of parameters."""
        # The first one's place may have what others are given, which is read before.
        _fill(self._gradients[::-1], gradients[::-1])
        self.backward.replay()
        for added in self._added:
            setattr(added, _ADDED, True)
        for of_input in self._input_gradients:
            yield of_input.clone() if self._is_first else of_input.detach()
        for parameter, gradient in zip(self._parameters, self._of_parameters, strict=True):
            if gradient is None:
                yield None
            elif gradient is self._own.get(parameter):
                yield gradient.clone()  # it may stay the parameter's gradient
            else:
                yield gradient.detach()  # what takes the place of an added one


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, piece: Piece, left: Callable[[], None] | None, num: int, *tensors: Tensor
    ) -> Any:
        ctx.piece, ctx.left = piece, left
        return piece.run_forward(tensors[:num])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        results = [*ctx.piece.run_backward(gradients)]
        if ctx.left is not None:
            ctx.left()
        return None, None, None, *results


def _put_sum(place: Tensor, tensors: Sequence[Tensor]) -> None:
    """Puts a sum of at most two in a place, where one of them may be; zeros without any."""
    if len(tensors) > 1:
        torch.add(*tensors, out=place)
    elif tensors:
        _fill([place], tensors)
    else:  # others write there, too
        place.zero_()


def put_at(place: Tensor, value: Tensor) -> Tensor:
    """Copies a value into a static buffer; its gradient passes unchanged."""

    def put(source: Tensor) -> Tensor:
        target = place.detach()
        return target.copy_(source)

    result: Tensor = with_backward(put, lambda gradient: gradient, value)
    return result


def forked(x: Tensor, num: int) -> tuple[Tensor, ...]:
    """So many times the same, whose gradients are added up in this order, whichever is there first:
    16 bits are rounded at every addition."""
    return with_backward(  # type: ignore[no-any-return]
        lambda source: tuple(source.detach() for _ in range(num)),
        lambda *gradients: functools.reduce(torch.add, gradients),
        x,
    )


def _fill(places: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copies what is not there already."""
    with torch.no_grad():
        for place, tensor in zip(places, tensors, strict=True):
            if place.data_ptr() != tensor.data_ptr():
                place.copy_(tensor)


@contextlib.contextmanager
def stand_ins(modules: Iterable[nn.Module]) -> Iterator[dict[int, nn.Parameter]]:
    """Puts others of the same storage in the place of modules' own parameters, and gives by the id
    of each the parameter. Autograd brings gradients of a leaf to the stream on which that was used
    first, and for parameters that is not the one that captures."""
    places = [
        (module, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    created: dict[int, nn.Parameter] = {}
    owners: dict[int, nn.Parameter] = {}
    try:
        for module, name, parameter in places:
            if id(parameter) not in created:
                stand_in = nn.Parameter(parameter.detach(), parameter.requires_grad)
                vars(stand_in).update(vars(parameter))
                if hasattr(stand_in, _ADDED):  # perhaps by another backward of the step
                    setattr(stand_in, _ADDED, False)
                created[id(parameter)], owners[id(stand_in)] = stand_in, parameter
            module._parameters[name] = created[id(parameter)]
        yield owners
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


class Used(NamedTuple):
    """What tensors are computed from.

    Attributes:
        parameters: that they depend on.
        nodes: of autograd's graph, between these and the tensors.
        borrowed: of earlier pieces, with the piece of each.
    """

    parameters: list[nn.Parameter]
    nodes: list[Any]
    borrowed: list[tuple[Piece, GradientEdge]]


def used(
    computed: Sequence[Tensor], ends: Sequence[Tensor], earlier: Mapping[Any, Piece]
) -> Used:  # fmt: skip
    """What tensors are computed from.

    Args:
        computed: the tensors.
        ends: leaves that are no parameters.
        earlier: nodes of the pieces before, and which of these each is of.

    Raises:
        CannotCaptureError: an earlier piece depends on the same: autograd would run it again.
    """
    inputs = {id(end) for end in ends}
    result = Used([], [], [])
    edges: dict[tuple[Any, int], None] = {}
    visited: set[Any] = set()
    waiting: list[tuple[Any, int]] = [get_gradient_edge(output)[:2] for output in computed]
    while waiting:
        node, _ = edge = waiting.pop()
        leaf = getattr(node, "variable", None)
        if node is None or node in visited or id(leaf) in inputs:
            continue
        if leaf is None and node in earlier:
            edges[edge] = None
            continue
        visited.add(node)
        if leaf is not None:
            result.parameters.append(leaf)
        waiting += node.next_functions
    result.nodes.extend(visited)
    result.borrowed.extend((earlier[node], GradientEdge(node, number)) for node, number in edges)
    requested = inputs | {id(parameter) for parameter in result.parameters}
    if _reaches({node for node, _ in edges}, requested):
        raise CannotCaptureError("what is behind a layer's core depends on what is before it")
    return result


def _reaches(begin: Set[Any], leaves: Set[int]) -> bool:
    """Whether nodes lead to one another, or to leaves, by their ids."""
    visited: set[Any] = set()
    waiting = [node for start in begin for node, _ in start.next_functions]
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        if node in begin or id(getattr(node, "variable", None)) in leaves:
            return True
        visited.add(node)
        waiting += [parent for parent, _ in node.next_functions]
    return False
