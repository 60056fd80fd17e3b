"""Graphs of one segment at a time, and their capture.

A layer is cut at its core attention, which sees other keys in every segment.  What is before it
(norm, projection, rotary embedding) and behind it (projection, residual connections, MLP) is the
same work for all segments of a length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatron_prefix.device import graphs
from megatron_prefix.layers.graphs.pieces import CannotCaptureError, Piece, stand_ins, used

ROTARY = "rotary_pos_emb"
_IGNORED = "attention_mask"
_NAMES = ("query", "key", "value")


class Sides(NamedTuple):
    """A layer's graphs."""

    before: Piece
    behind: Piece


class Cuts(Protocol):
    """Takes queries, keys and values of a layer, and gives what attention makes of them."""

    cut: Callable[[Tensor, Tensor, Tensor], Tensor] | None


class SegmentGraphs:
    """Graphs of some layers for one segment at a time, of any length up to that of the first.

    Args:
        stock: forwards of the layers.
        modules: the layers.
        owner: has `cut` called in the place of core attention while it is not None.

    Attributes:
        most: positions of the first segment on this rank; longer ones have no place.
        made: the graphs of every layer, by positions of a segment on this rank.
    """

    def __init__(
        self, stock: Sequence[Callable[..., Any]], modules: Sequence[nn.Module], most: int,
        owner: Cuts,
    ) -> None:  # fmt: skip
        self._stock, self._modules, self._owner = stock, modules, owner
        self.most = most
        self._pool = graphs.pool()
        self._places: dict[Any, Tensor] = {}
        self._owners: Mapping[int, nn.Parameter] = {}
        self._kept: list[Tensor] = []
        self.made: dict[int, list[Sides]] = {}

    def begin(self, given: Mapping[str, Any]) -> None:
        """Takes what a segment's layers are given besides hidden states."""
        if (turned := given.get(ROTARY)) is not None:
            self._place(ROTARY, turned).copy_(turned)

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
        graphs.settle()
        every = range(len(self._modules))
        with graphs.apart(), stand_ins(self._modules) as self._owners:
            try:
                for number in every:
                    self._rehearse(number, hidden, arguments)
                graphs.settle()
                made = [self._forward(number, hidden, arguments) for number in every]
                for number in reversed(every):
                    self._backward(made[number], number)
            finally:
                self._owner.cut, self._owners = None, {}
        self._kept += _shared_buffers()
        self.made[len(hidden)] = made

    def _arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        arguments = dict(given)
        for name, value in given.items():
            if name == ROTARY and isinstance(value, Tensor):
                arguments[name] = self._place(ROTARY, value)
                arguments[name].copy_(value)
            elif name == _IGNORED:
                arguments[name] = None
            elif not isinstance(value, bool | int | float | str | None):
                raise CannotCaptureError(f"layers are given {name}")
        return arguments

    def _place(self, name: Any, like: Tensor, *, shape: Sequence[int] | None = None) -> Tensor:
        """The place of what has a name, as many rows of it as `like` has; the first is the longest.

        Hidden states of sequence-parallel ranks have fewer rows than queries.
        """
        if name not in self._places:
            rest = like.shape[1:] if shape is None else shape
            self._places[name] = like.new_empty((len(like), *rest), requires_grad=False)
        return self._places[name][: len(like)].detach()

    def _rehearse(self, number: int, hidden: Tensor, given: Mapping[str, Any]) -> None:
        """Runs a layer on the stream of captures: what is loaded or allocated once is then there.
        All gradients are zero, so main gradients do not change."""
        kept: list[Tensor] = []

        def cut(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            kept.extend((query, key, value))
            return query.new_zeros(_mixed(query, value)).requires_grad_()

        x = torch.zeros_like(hidden).requires_grad_()
        self._owner.cut = cut
        outputs = [self._layer(number, x, given), *kept]
        leaves = [one for one in self._modules[number].parameters() if one.requires_grad]
        zeros = [torch.zeros_like(one) for one in outputs]
        torch.autograd.grad(outputs, [x, *leaves], zeros, allow_unused=True)

    def _layer(self, number: int, x: Tensor, given: Mapping[str, Any]) -> Tensor:
        outputs = self._stock[number](hidden_states=x, **given)
        if not isinstance(outputs, tuple) or not isinstance(outputs[0], Tensor):
            raise CannotCaptureError("a layer is put together differently from Megatron's")
        y, *more = outputs
        if any(one is not None for one in more):
            raise CannotCaptureError("a layer gives more than hidden states")
        return y

    def _forward(self, number: int, hidden: Tensor, given: Mapping[str, Any]) -> Sides:
        """Captures a layer's forward, in two pieces."""
        before, behind = Piece(self._pool), Piece(self._pool)
        x = self._place(("hidden", number), hidden).requires_grad_()
        nodes: set[Any] = set()
        mixed: list[Tensor] = []
        running = [before]

        def cut(*computed: Tensor) -> Tensor:
            names = zip(_NAMES, computed, strict=True)
            before.end([x], computed, [self._place((name, number), one) for name, one in names])
            running.clear()
            parameters, seen = used(computed, [x], set())
            before.uses(parameters, self._owners)
            nodes.update(seen)
            query, _, value = computed
            shape = _mixed(query, value)[1:]
            mixed.append(self._place(("mixed", number), query, shape=shape).requires_grad_())
            behind.forward.begin()
            running.append(behind)
            return mixed[0]

        self._owner.cut = cut
        before.forward.begin()
        try:
            y = self._layer(number, x, given)
            if not mixed:
                raise CannotCaptureError("a layer does not call its core attention")
            inputs = [mixed[0], x]
            behind.end(inputs, [y], [self._place(("hidden", number + 1), y)])
        except BaseException:
            for one in running:
                one.forward.abandon()
            raise
        behind.uses(used([y], inputs, nodes)[0], self._owners)
        return Sides(before, behind)

    def _backward(self, sides: Sides, number: int) -> None:
        before, behind = sides
        mixed, x = behind.inputs
        behind.capture_backward(
            [self._place("gradient", *behind.outputs)],
            [self._place("gradient of mixed", mixed), self._place("gradient of residual", x)],
        )
        gradients = zip(_NAMES, before.outputs, strict=True)
        before.capture_backward(
            [self._place(f"gradient of {name}", one) for name, one in gradients],
            [self._place("gradient of hidden", x)],
        )


def _shared_buffers() -> list[Tensor]:
    """Where Megatron's own layers gather what sequence-parallel ranks have (GlobalMemoryBuffer in
    megatron/core/utils.py): a longer segment gets another one, and graphs go on using this."""
    from megatron.core.parallel_state import get_global_memory_buffer

    return [*get_global_memory_buffer().buffer.values()]


def _mixed(query: Tensor, value: Tensor) -> tuple[int, int, int]:
    """The shape of core attention's output: [positions, 1, heads * value_dim]."""
    return len(query), 1, query.shape[2] * value.shape[3]
