"""A piece of a layer that is captured once and replayed: what is before its attention, or behind.

A piece has two graphs, one of its forward and one of its backward.  They read and write tensors at
fixed places (`Places`); what is given is copied there, unless it is there already.  Everything else
that they use is in a pool of memory of their own, in which graphs that are captured later lie where
earlier ones have ended: graphs must be replayed in the order in which they were captured (all
forwards, then all backwards, the last first), and a second length only when the first has ended.

Gradients of weights that products add to main gradients themselves
(`gradient_accumulation_fusion`) are added by a replay as well.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

SMALL = 2**20
"""Gradients of parameters with at most so many numbers have a place of their own, for norms and
biases.  Larger ones must be added to main gradients by their products."""

_ADDED = "grad_added_to_main_grad"


class CannotCapture(Exception):
    """What a layer runs cannot be captured; the message says why."""


class Piece:
    """Graphs of one piece, for one number of positions.

    Attributes:
        inputs: the tensors that its forward reads.
        outputs: those that it writes.
        gradients: of the outputs, which its backward reads.
        input_gradients: which it writes.
        parameters: that it uses and that have gradients.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.inputs: tuple[Tensor, ...] = ()
        self.outputs: tuple[Tensor, ...] = ()
        self.gradients: tuple[Tensor, ...] = ()
        self.input_gradients: tuple[Tensor, ...] = ()
        self.parameters: tuple[nn.Parameter, ...] = ()
        self._parameter_gradients: list[Tensor | None] = []
        self._added: tuple[nn.Parameter, ...] = ()
        self._computed: tuple[Tensor, ...] = ()
        self._leaves: tuple[nn.Parameter, ...] = ()
        self._open = False
        self._own: dict[nn.Parameter, Tensor] = {}

    def begin(self) -> None:
        """Begins to capture its forward on the current stream."""
        self._forward.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._open = True

    def abandon(self) -> None:
        """Ends a capture that has failed."""
        if self._open:
            with contextlib.suppress(RuntimeError):
                self._forward.capture_end()
        self._open, self._computed = False, ()

    def end(self, inputs: Sequence[Tensor], computed: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        """Ends it.

        Args:
            inputs: leaves that it has read, with gradients.
            computed: from them.
            places: where it writes these.
        """
        with torch.no_grad():
            for place, one in zip(places, computed, strict=True):
                place.copy_(one)
        self._forward.capture_end()
        self._open = False
        self.inputs, self._computed, self.outputs = tuple(inputs), tuple(computed), tuple(places)

    def capture_backward(self, gradients: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        """Captures its backward; afterwards nothing of its forward's graph is left.

        Args:
            gradients: where those of its outputs will be.
            places: where it writes those of its inputs.
        """
        wanted = [*self.inputs, *self._leaves]
        self._backward.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            found = torch.autograd.grad(self._computed, wanted, gradients, allow_unused=True)
            with torch.no_grad():
                for place, one in zip(places, found, strict=False):
                    place.zero_() if one is None else place.copy_(one)
                self._keep(found[len(self.inputs) :])
        finally:
            self._backward.capture_end()
        self._computed, self._leaves = (), ()
        self.gradients, self.input_gradients = tuple(gradients), tuple(places)

    def _keep(self, found: Sequence[Tensor | None]) -> None:
        added = [getattr(one, _ADDED, False) for one in self._leaves]
        self._added = tuple(itertools.compress(self.parameters, added))
        for parameter, fused, gradient in zip(self.parameters, added, found, strict=True):
            if not fused and gradient is not None:
                if parameter not in self._own:
                    raise CannotCapture("a weight's gradient is not added to main_grad by its product")
                place = self._own[parameter]
                place.copy_(gradient)
                gradient = place
            self._parameter_gradients.append(gradient)

    def uses(self, leaves: Sequence[nn.Parameter], owners: Mapping[int, nn.Parameter]) -> None:
        """Says which stand-ins of parameters it uses; outside of a capture."""
        self._leaves = tuple(leaves)
        self.parameters = tuple(owners[id(one)] for one in leaves)
        self._own = {one: torch.empty_like(one) for one in self.parameters if one.numel() <= SMALL}

    def __call__(self, *inputs: Tensor) -> Any:
        """Its outputs, from its inputs."""
        return _Replayed.apply(self, len(inputs), *inputs, *self.parameters)

    def run_forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Replays its forward."""
        _put(self.inputs, inputs)
        self._forward.replay()
        return tuple(one.detach() for one in self.outputs)

    def run_backward(self, gradients: Sequence[Tensor]) -> Iterator[Tensor | None]:
        """Replays its backward: gradients of inputs and of parameters."""
        _put(self.gradients, gradients)
        self._backward.replay()
        for one in self._added:
            setattr(one, _ADDED, True)
        yield from (one.detach() for one in self.input_gradients)
        for parameter, gradient in zip(self.parameters, self._parameter_gradients, strict=True):
            if gradient is None:
                yield None
            elif parameter in self._own:
                yield gradient.clone()  # it may be kept as the parameter's gradient
            else:
                yield gradient.detach()


@contextlib.contextmanager
def stand_ins(module: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
    """Puts others of the same storage in the place of a module's parameters: by the id of each the
    parameter. Autograd takes gradients of a leaf to the stream on which it was first used, and for
    parameters that is not the one that captures."""
    owners: dict[int, nn.Parameter] = {}
    made: dict[int, nn.Parameter] = {}
    places = [
        (one, name, parameter)
        for one in module.modules()
        for name, parameter in one._parameters.items()
        if parameter is not None
    ]
    try:
        for one, name, parameter in places:
            if id(parameter) not in made:
                other = nn.Parameter(parameter.detach(), parameter.requires_grad)
                vars(other).update(vars(parameter))
                if hasattr(other, _ADDED):  # perhaps of another backward of the step
                    setattr(other, _ADDED, False)
                made[id(parameter)], owners[id(other)] = other, parameter
            one._parameters[name] = made[id(parameter)]
        yield owners
    finally:
        for one, name, parameter in places:
            one._parameters[name] = parameter


def _put(places: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    for place, one in zip(places, given, strict=True):
        if place.data_ptr() != one.data_ptr():
            with torch.no_grad():
                place.copy_(one)


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Piece, num: int, *tensors: Tensor) -> Any:  # type: ignore[override]
        ctx.piece = piece
        found = piece.run_forward(tensors[:num])
        return found if len(found) > 1 else found[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.piece.run_backward(gradients)


def parameters_of(computed: Sequence[Tensor], ends: Sequence[Tensor], others: set[Any]) -> tuple[tuple[nn.Parameter, ...], set[Any]]:
    """Parameters that tensors depend on, and the nodes of autograd between.

    Args:
        computed: the tensors.
        ends: leaves that are no parameters.
        others: nodes of another piece.

    Raises:
        CannotCapture: they depend on something of another piece, besides `ends`.
    """
    leaves = {id(one) for one in ends}
    found: dict[int, nn.Parameter] = {}
    seen: set[Any] = set()
    waiting = [one.grad_fn for one in computed if one.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in leaves:
            continue
        if node in others:
            raise CannotCapture("what is behind attention reads what is before it")
        seen.add(node)
        if variable is not None:
            found[id(variable)] = variable
        waiting += [parent for parent, _ in node.next_functions if parent is not None]
    return tuple(found.values()), seen
