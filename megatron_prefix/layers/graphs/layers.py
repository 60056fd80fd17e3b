"""Which layers and segments run on CUDA graphs, and where these read and write.

A layer is cut at its core attention, which sees other keys in every segment: what is before it
(norm, projection, rotary embedding) and behind it (projection, residual connections, MLP) is the
same work for all segments of a length.  One segment at a time has its graphs: from its forward to
its backward nobody else may write where they do.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_prefix.layers.graphs.pieces import CannotCapture, Piece, parameters_of, stand_ins
from megatron_prefix.layers.kind import Running

logger = logging.getLogger(__name__)
EAGER = 1
"""A length is captured when so many segments of it have run: what compiles does it in these."""


class Sides(NamedTuple):
    """A layer's graphs."""

    before: Piece
    behind: Piece


class LayerGraphs:
    """Graphs of the layers of one model chunk.

    Args:
        layers: Megatron's, in the order in which they run.
        running: says which segment runs.
        most: positions of the longest segment that has graphs.

    Attributes:
        cut: takes queries, keys and values while a layer is captured; None at other times.
    """

    def __init__(self, layers: Sequence[Any], running: Running, most: int) -> None:
        self._layers, self._running, self.most = layers, running, most
        self._stock = [one.forward for one in layers]
        self.cut: Callable[..., Tensor] | None = None
        self._seen: Counter[int] = Counter()
        self._made: dict[int, list[Sides]] = {}
        self._owner: int | None = None
        self._sides: list[Sides] | None = None
        self._places: dict[Any, Tensor] = {}
        self._rotary: Tensor | None = None
        self._addresses: tuple[int, ...] = ()
        self._pool: Any = None
        self._owners: Mapping[int, nn.Parameter] = {}
        self.why_not = ""

    def forward(self, number: int) -> Callable[..., Any]:
        """What takes the place of a layer's forward."""
        stock, core = self._stock[number], self._layers[number].self_attention.core_attention

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            context = self._running.current
            if context is None or self.cut is not None or self.why_not:
                return stock(hidden_states, *args, **kwargs)
            if number == 0:
                self._begin(context, hidden_states, args, kwargs)
            if self._sides is None or self._owner != context.index or context.backward:
                return stock(hidden_states, *args, **kwargs)
            before, behind = self._sides[number]
            mixed = core.forward(*before(hidden_states))
            return behind(mixed, hidden_states), None

        return forward

    def release(self, segment: int) -> None:
        """After a segment's backward."""
        if self._owner == segment:
            self._owner = self._sides = None

    def begin_step(self) -> None:
        """Nothing of a step before is left, and what has moved since is captured again."""
        self._owner = self._sides = None
        if self._made and self._addresses != self._current_addresses():
            logger.info("weights or gradients have moved: graphs are captured again")
            self._made.clear()

    def _current_addresses(self) -> tuple[int, ...]:
        found = []
        for layer in self._layers:
            for one in layer.parameters():
                main = getattr(one, "main_grad", None)
                found += [one.data_ptr(), 0 if main is None else main.data_ptr()]
        return tuple(found)

    def _begin(self, context: Any, hidden: Tensor, args: Any, kwargs: Mapping[str, Any]) -> None:
        """The first layer of a segment: it has graphs, gets them, or has none."""
        length = len(hidden)
        plain = not (args or context.activates_again or context.offload or context.backward)
        if self._owner is not None or not plain or length > self.most or not torch.is_grad_enabled():
            return
        self._seen[length] += 1
        if length not in self._made:
            if self._seen[length] <= EAGER:
                return
            self._try_capture(length, hidden, kwargs)
        if length in self._made:
            self._owner, self._sides = context.index, self._made[length]
            if (turned := kwargs.get("rotary_pos_emb")) is not None:
                self._place("rotary", turned).copy_(turned)

    def _try_capture(self, length: int, hidden: Tensor, kwargs: Mapping[str, Any]) -> None:
        try:
            self._made[length] = self._captured(hidden, kwargs)
        except (CannotCapture, RuntimeError) as problem:
            logger.exception("capture")
            self.why_not = str(problem).splitlines()[0]
            logger.warning("no CUDA graphs: %s", self.why_not)
            self._made.clear()
        else:
            self._addresses = self._current_addresses()
            logger.info("captured %d layers of %d positions", len(self._layers), length)
        finally:
            self.cut = None

    def _place(self, name: Any, like: Tensor, wants_gradient: bool = False) -> Tensor:
        """A tensor of the shape of `like` that has its place for good, for all lengths."""
        if name not in self._places:
            rows = self.most
            self._places[name] = like.new_empty((rows, *like.shape[1:]))
        found = self._places[name][: len(like)].detach()
        return found.requires_grad_() if wants_gradient else found

    def _captured(self, hidden: Tensor, kwargs: Mapping[str, Any]) -> list[Sides]:
        given = dict(kwargs)
        for name, value in kwargs.items():
            if isinstance(value, Tensor):
                if name == "rotary_pos_emb":
                    given[name] = self._place("rotary", value)
                    given[name].copy_(value)
                elif name == "attention_mask":
                    given[name] = None
                else:
                    raise CannotCapture(f"layers get {name}")
            elif isinstance(value, tuple | list):
                raise CannotCapture(f"layers get several {name}")
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), stand_ins(nn.ModuleList(self._layers)) as self._owners:
            for number in range(len(self._layers)):
                self._warm(number, hidden, given)
            torch.cuda.synchronize()
            found = [self._layer(n, hidden, given) for n in range(len(self._layers))]
            for number in reversed(range(len(self._layers))):
                self._backwards(found[number], hidden, number)
        torch.cuda.current_stream().wait_stream(stream)
        return found

    def _warm(self, number: int, hidden: Tensor, given: Mapping[str, Any]) -> None:
        """Runs a layer on the stream of captures: what is loaded or allocated once is then there.
        Gradients are zeros, so main gradients do not change."""
        x = torch.zeros_like(hidden).requires_grad_()

        def cut(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            kept.extend((query, key, value))
            flat = query.new_zeros((len(query), 1, query.shape[2] * value.shape[3]))
            return flat.requires_grad_()

        kept: list[Tensor] = []
        self.cut = cut
        y, _ = self._stock[number](x, **given)
        self.cut = None
        outputs = [y, *kept]
        leaves = [one for one in self._layers[number].parameters() if one.requires_grad]
        torch.autograd.grad(
            outputs, [x, *leaves], [torch.zeros_like(one) for one in outputs], allow_unused=True
        )

    def _layer(self, number: int, hidden: Tensor, given: Mapping[str, Any]) -> Sides:
        """Captures a layer's forward, in two pieces."""
        before, behind = Piece(self._pool), Piece(self._pool)
        x = self._place(("hidden", number), hidden, wants_gradient=True)
        nodes: set[Any] = set()
        mixed: list[Tensor] = []

        def cut(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            computed = query, key, value
            places = [self._place((name, number), one) for name, one in zip("qkv", computed)]
            before.end([x], computed, places)
            leaves, seen = parameters_of(computed, [x], set())
            before.uses(leaves, self._owners)
            nodes.update(seen)
            flat = query.new_empty((len(query), 1, query.shape[2] * value.shape[3]))
            mixed.append(self._place(("mixed", number), flat, wants_gradient=True))
            behind.begin()
            return mixed[0]

        self.cut = cut
        try:
            before.begin()
            y, rest = self._stock[number](x, **given)
            if rest is not None or not mixed:
                raise CannotCapture("a layer is put together differently from Megatron's")
        except BaseException:
            before.abandon()
            behind.abandon()
            raise
        behind.end([mixed[0], x], [y], [self._place(("hidden", number + 1), y)])
        self.cut = None
        behind.uses(parameters_of([y], [mixed[0], x], nodes)[0], self._owners)
        return Sides(before, behind)

    def _backwards(self, sides: Sides, hidden: Tensor, number: int) -> None:
        before, behind = sides
        mixed, x = behind.inputs
        behind.capture_backward(
            [self._place("gradient", hidden)],
            [self._place("mixed gradient", mixed), self._place("residual gradient", x)],
        )
        before.capture_backward(
            [self._place(f"{name} gradient", one) for name, one in zip("qkv", before.outputs)],
            [self._place("input gradient", x)],
        )
