"""One of Megatron's layers, as its graphs cut it.

A layer is cut at its core attention, which sees other keys in every segment.  Experts wait for the
device, which says how many tokens each of them gets, so a layer of experts is cut once more: where
`_forward_mlp` begins (TransformerLayer in megatron/core/transformer/transformer_layer.py).  The
norm in front of them is captured, what is behind that runs as without graphs: Megatron's own
method, with that norm's output at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from megatron_prefix.device.modules import modules_of
from megatron_prefix.layers.graphs.pieces import CannotCaptureError, Piece
from megatron_prefix.layers.kind import Override

OTHER_LAYER = "a layer is put together differently from Megatron's"


class Sides(NamedTuple):
    """A layer's graphs.

    Attributes:
        before: its core attention.
        behind: it, up to the end of the layer, or to where its experts begin.
    """

    before: Piece
    behind: Piece


class Cut(Protocol):
    """What layers call while they are captured."""

    def attention(self, query: Tensor, key: Tensor, value: Tensor, *crossing: Tensor) -> Tensor:
        """In the place of core attention, which is given the rest behind a graph."""
        ...

    def experts(self, hidden: Tensor, norm: Callable[[Tensor], Any]) -> Tensor:
        """In the place of what runs without graphs.

        Args:
            hidden: [positions, 1, hidden_size], what it is given.
            norm: the first that it does with this.

        Returns:
            What the layer gives.
        """
        ...


class Cuts(Protocol):
    """Says whether layers are captured: `cut` is None at other times."""

    cut: Cut | None


def can_be_cut(module: Any) -> bool:
    """Whether a layer of experts has what it is cut at."""
    return hasattr(module, "_forward_mlp") and hasattr(module, "pre_mlp_layernorm")


class CutLayer:
    """A layer.

    Args:
        module: Megatron's, with core attention.
        apart: its MLP, if that runs without graphs.
        owner: says whether layers are captured.

    Attributes:
        stock: its forward.
    """

    def __init__(self, module: Any, apart: Any | None, owner: Cuts) -> None:
        self.stock, self._module, self._owner = module.forward, module, owner
        self._apart = apart
        self._core = module.self_attention.core_attention
        self._given: tuple[tuple[Any, ...], Mapping[str, Any]] = (), {}
        self._normed: tuple[Tensor, Tensor] | None = None
        if apart is not None:
            self._forward_mlp, self._norm = module._forward_mlp, module.pre_mlp_layernorm.forward

    def modules(self) -> Iterator[nn.Module]:
        """Those that graphs run, the layer itself among them."""
        others = set(modules_of(self._apart)) if self._apart is not None else ()
        yield from (one for one in modules_of(self._module) if one not in others)

    def parameters(self) -> list[nn.Parameter]:
        """Those of these modules."""
        found = (one for module in self.modules() for one in module._parameters.values())
        return [*{id(one): one for one in found if one is not None}.values()]

    def buffers(self) -> Iterator[Tensor]:
        """Those of these modules."""
        found = (one for module in self.modules() for one in module._buffers.values())
        yield from (one for one in found if one is not None)

    def overrides(self) -> Iterator[Override]:
        """What takes the place of methods of its modules, but for its forward."""
        if self._apart is not None:
            yield self._module, "_forward_mlp", self._of_experts
            yield self._module.pre_mlp_layernorm, "forward", self._norm_at_hand

    def replayed(self, sides: Sides, hidden: Tensor) -> Tensor:
        """What it makes of hidden states."""
        query, key, value, *crossing, hidden = sides.before(hidden)
        into = sides.behind.inputs[0].detach()
        mixed = self._core.forward(query, key, value, crossing=crossing, into=into)
        y: Tensor = sides.behind(mixed, hidden)
        return y if self._apart is None else self._with_experts(y)

    def _with_experts(self, made: Any) -> Tensor:
        """What it makes of what its graphs have made: what experts are added to, and of its norm
        if that is a tensor."""
        hidden, *normed = made if isinstance(made, tuple) else (made,)
        positional, named = self._given
        self._normed = (hidden, *normed) if normed else None
        try:
            y: Tensor = self._forward_mlp(hidden, *positional, **named)
        finally:
            self._normed = None
        return y

    def _of_experts(self, *args: Any, **kwargs: Any) -> Any:
        """Its method `_forward_mlp`."""
        if self._owner.cut is None:
            return self._forward_mlp(*args, **kwargs)
        hidden, *more = args
        if any(isinstance(one, Tensor) for one in (*more, *kwargs.values())):
            raise CannotCaptureError(OTHER_LAYER)
        self._given = (*more,), kwargs
        return self._owner.cut.experts(hidden, self._module.pre_mlp_layernorm)

    def _norm_at_hand(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The norm in front of its experts; a graph has made its output."""
        if self._normed is not None and x is self._normed[0]:
            return self._normed[1]
        return self._norm(x, *args, **kwargs)
