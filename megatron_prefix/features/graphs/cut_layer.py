"""One of Megatron's layers, as its graphs cut it.

A layer is cut at the cores of its mixer, which see other positions in every segment: core
attention that cannot be inside (placed.py), or a recurrent layer's convolution and rule.  Its kind
says where they are (`Cut.core`).
Experts wait for the device, which says how many tokens each of them gets, so a layer of experts is
cut once more: where `_forward_mlp` begins (TransformerLayer in
megatron/core/transformer/transformer_layer.py).  The norm in front of them is captured, and what
shared experts and the router's product make of its output; the rest runs as without graphs:
Megatron's own method, with these at hand.  Shared experts are a launch of their own, when tokens
are sent to the others: with that the device is busy while the host hears how many each gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from megatron_prefix.device.modules import modules_of
from megatron_prefix.features.graphs.kinds import Graphed, graphed, inside_form, looks_back
from megatron_prefix.features.graphs.pieces import SMALL, CannotCaptureError, Piece
from megatron_prefix.layers.attention import softmax_scale
from megatron_prefix.layers.kind import Override, Part, owner
from megatron_prefix.layers.segment import SegmentContext
from megatron_prefix.tree.payload_map import Form

OTHER_LAYER = "a layer is put together differently from Megatron's"
_NORM, _MOE = "norm in front of experts", "megatron.core.transformer.moe"
_SEND = "dispatch"
"""MoELayer's method that sends tokens to experts: what routes them is under way, and the host has
not waited for it yet."""
_NORMS = "input_layernorm", "norm"
"""What Megatron's layers have in front of their mixers, of TransformerLayer and of MambaLayer."""

Core = Callable[..., Tensor]
"""(tensors that the graph in front has made, into=where the one behind reads) -> what it makes of
them, there or elsewhere."""


class Sides(NamedTuple):
    """A layer's graphs.

    Attributes:
        pieces: in the order in which they run, to the end of the layer or to where its experts
            begin; none if a layer before it has run it as well.
        cores: what runs between them.
        inside: the numbers of payloads of layers whose cores are in these graphs.
    """

    pieces: Sequence[Piece] = ()
    cores: Sequence[Core] = ()
    inside: Sequence[int] = ()


class Cut(Protocol):
    """What layers call while they are captured."""

    def core(
        self,
        run: Core,
        inputs: Sequence[Tensor],
        shape: Sequence[int],
        passing: Sequence[Tensor] = (),
    ) -> Tensor:
        """In the place of what runs between two graphs.

        Args:
            run: that, from now on. It uses parameters as they are in their modules then.
            inputs: what it is given, as many numbers a position of each in every segment.
            shape: of what it makes, in the dtype of the first that it is given.
            passing: what it is given besides, and keeps nothing of: all layers have one place.

        Returns:
            What it will make.
        """
        ...

    def entering(self, hidden: Tensor) -> Tensor:
        """What a norm in front of a mixer is given, if it is given these hidden states."""
        ...

    def experts(
        self, hidden: Tensor, norm: Callable[[Tensor], Any], unrouted: Sequence[UnroutedPart]
    ) -> Tensor:
        """In the place of what runs without graphs.

        Args:
            hidden: [positions, 1, hidden_size], what it is given.
            norm: the first that it does with this.
            unrouted: what it makes of that before tokens go to experts.

        Returns:
            What the layer gives.
        """
        ...


class Cuts(Protocol):
    """Says whether layers are captured: `cut` is None at other times."""

    cut: Cut | None

    def attending(self, context: SegmentContext) -> AbstractContextManager[None]:
        """Around a core that is captured, as of a segment."""
        ...


def can_be_cut(module: Any) -> bool:
    """Whether a layer of experts has what it is cut at."""
    return hasattr(module, "_forward_mlp") and hasattr(module, "pre_mlp_layernorm")


class UnroutedPart(NamedTuple):
    """A method of a layer of experts that makes a tensor of its norm's output, whichever experts
    tokens go to.

    Attributes:
        holder, method: whose, and its name.
        inside: the module whose weights it uses.
        is_kept: whether what reads its output keeps that for the backward.
        functions: methods of Megatron's that it relies on, each with its class and name.
        can_wait: whether nothing reads its output before tokens are sent to experts; the last.
    """

    holder: Any
    method: str
    inside: nn.Module
    is_kept: bool
    functions: Sequence[tuple[type, str, Any]]
    can_wait: bool = False

    def run(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The method as its class has it now."""
        return getattr(type(self.holder), self.method)(self.holder, x, *args, **kwargs)

    @property
    def is_stock(self) -> bool:
        """Whether its classes still have these functions."""
        return all(getattr(kind, name) is function for kind, name, function in self.functions)


def unrouted_parts(experts: Any) -> Iterator[UnroutedPart]:
    """What graphs run of a layer of experts: shared ones, unless they overlap with messages, if
    Megatron only adds what they make; and the router's product, if it is given the norm's output
    and hands on its weight's gradient (`SMALL`)."""
    given_norm = getattr(experts.router.config, "moe_input_jitter_eps", None) is None
    of_router = _methods_of(experts.router, f"{_MOE}.router.Router", "gating")
    if of_router and given_norm and experts.router.weight.numel() <= SMALL:
        yield UnroutedPart(experts.router, "gating", experts.router, True, of_router)
    shared = getattr(experts, "shared_experts", None)
    if isinstance(shared, nn.Module) and not getattr(experts, "shared_expert_overlap", True):
        kind, names = f"{_MOE}.moe_layer.MoELayer", ("shared_experts_compute", "forward")
        of_experts = _methods_of(experts, kind, *names, "postprocess")
        of_shared = _methods_of(shared, f"{_MOE}.shared_experts.SharedExpertMLP", "forward")
        if of_experts and of_shared:
            sends = _methods_of(experts, kind, _SEND)
            functions = [*of_experts, *of_shared, *sends]
            yield UnroutedPart(experts, names[0], shared, False, functions, bool(sends))


def _methods_of(module: Any, expected: str, *names: str) -> list[tuple[type, str, Any]]:
    """Methods of a module, which are those of a class of Megatron's; none if one is another's."""
    if any(owner(module, name) != expected for name in names):
        return []
    return [(type(module), name, getattr(type(module), name)) for name in names]


class CutLayer:
    """A layer.

    Args:
        module: Megatron's.
        number: of it in its model chunk; one more than another layer's only if it is given what
            that one gives.
        mixer, mlp: what fills its slots.
        owner: says whether layers are captured.

    Attributes:
        stock: its forward.
        module, number: as given.
        kinds: what fills its slots.
        unrouted: what its graphs run of its experts.
        mixes: whether it has a mixer.
        inside: what it leaves, if graphs may have its core inside.
        before: positions that its convolution looks back, if it is recurrent.
        follows: whether the layer in front of it has graphs, too.

    Raises:
        CannotCaptureError: a layer of experts has not what it is cut at.
    """

    def __init__(self, module: Any, number: int, mixer: Part, mlp: Part, owner: Cuts) -> None:
        self.stock, self.module, self._owner = module.forward, module, owner
        self.number, self.kinds = number, (mixer.kind, mlp.kind)
        self.mixes, self.follows = mixer.kind is not None, False
        self.inside, self._mixer = inside_form(mixer), mixer.module
        self.before = looks_back(mixer) if self.inside == Form.SPANS else 0
        self._apart = None
        if mlp.kind is not None and graphed(mlp.kind, module.config) is Graphed.IN_FRONT:
            if not can_be_cut(module):
                raise CannotCaptureError(OTHER_LAYER)
            self._apart = mlp.module
        self._alone = False
        self._arguments: dict[str, Any] = {}
        self._given: tuple[tuple[Any, ...], Mapping[str, Any]] = (), {}
        self.unrouted: Sequence[UnroutedPart] = ()
        self._at_hand: dict[str, tuple[Tensor, Tensor]] = {}
        self._rest: Any = None  # of what is at hand the graph that is not launched yet
        self._enters = next(
            (getattr(module, name) for name in _NORMS if hasattr(module, name)), None
        )
        if self._enters is not None:
            self._stock_norm = self._enters.forward
        if self._apart is not None:
            self._forward_mlp, self._norm = module._forward_mlp, module.pre_mlp_layernorm.forward
            self.unrouted = [*unrouted_parts(self._apart)]

    @property
    def scale(self) -> float:
        """Of its scores, if it attends: a number that its graphs have from their capture on."""
        return softmax_scale(self._mixer) if self.inside == Form.POSITIONS else 1.0

    @property
    def has_experts(self) -> bool:
        """Whether what is behind its graphs runs without."""
        return self._apart is not None

    def modules(self) -> Iterator[nn.Module]:
        """Those that graphs run, the layer itself among them."""
        excluded = set(modules_of(self._apart)) if self._apart is not None else set()
        for part in self.unrouted:
            excluded.difference_update(modules_of(part.inside))
        yield from (module for module in modules_of(self.module) if module not in excluded)

    def parameters(self) -> list[nn.Parameter]:
        """Those of these modules."""
        weights = (
            parameter for module in self.modules() for parameter in module._parameters.values()
        )
        return [
            *{id(parameter): parameter for parameter in weights if parameter is not None}.values()
        ]

    def leave_out_replaced(self) -> bool:
        """Leaves parts of which a method was replaced out of graphs; whether there are any."""
        before, self.unrouted = self.unrouted, [part for part in self.unrouted if part.is_stock]
        return len(self.unrouted) < len(before)

    def overrides(self) -> Iterator[Override]:
        """What takes the place of methods of its modules, but for its forward."""
        if self._enters is not None:
            yield self._enters, "forward", self._entering
        if self._apart is not None:
            yield self.module, "_forward_mlp", self._of_experts
            yield self.module.pre_mlp_layernorm, "forward", self._at_hand_or(_NORM, self._norm)
            for part in self.unrouted:
                name = part.method
                yield part.holder, name, self._at_hand_or(name, part.run)
            if any(part.can_wait for part in self.unrouted):
                yield self._apart, _SEND, self._sending

    def plain(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Its forward without graphs, which shows what else it is given: in place of a tensor the
        class."""
        self._arguments = {
            name: Tensor if isinstance(value, Tensor) else value for name, value in kwargs.items()
        }
        return self.stock(hidden, *args, **kwargs)

    def captured(self, hidden: Tensor, tensors: Mapping[str, Tensor | None]) -> Tensor:
        """Output of its forward, with `tensors` put in by the names of their arguments.

        Raises:
            CannotCaptureError: it is given, or gives, more.
        """
        arguments = dict(self._arguments)
        for name, value in arguments.items():
            if value is Tensor and name in tensors:
                arguments[name] = tensors[name]
            elif not isinstance(value, bool | int | float | str | None):
                raise CannotCaptureError(f"layers are given {name}")
        result = self.stock(hidden_states=hidden, **arguments)
        self._alone = isinstance(result, Tensor)
        y, *extra = (result,) if self._alone else result
        if not isinstance(y, Tensor):
            raise CannotCaptureError(OTHER_LAYER)
        if any(output is not None for output in extra):
            raise CannotCaptureError("a layer gives more than hidden states")
        return y

    def replayed(
        self,
        sides: Sides,
        hidden: Tensor,
        *,
        stays: bool = True,
        left: Callable[[], None] | None = None,
    ) -> Any:
        """What it gives for hidden states; a copy of its own, unless what is in its place `stays`
        there for as long as it is read. `left` is called behind the backward of its first part."""
        if not sides.pieces:
            y = hidden if stays else hidden.clone()
            return y if self._alone else (y, None)
        first, *following = sides.pieces
        created = first(hidden, left=left)
        if following:
            *created, hidden = created
        for piece, core in zip(following, sides.cores, strict=True):
            mixed = core(*created, into=piece.inputs[0].detach())
            created = piece(mixed, *([hidden] if piece is following[-1] else ()))
        y = created[0] if self._apart is None else self._with_experts(sides.pieces[-1], *created)
        y = y if stays else y.clone()
        return y if self._alone else (y, None)

    def _entering(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The norm in front of its mixer."""
        cut = self._owner.cut
        return self._stock_norm(x if cut is None else cut.entering(x), *args, **kwargs)

    def _with_experts(
        self, piece: Piece, hidden: Tensor, normed: Tensor | None = None, *created: Tensor
    ) -> Tensor:
        """What it makes of what its last piece has made: what experts are added to, and if its norm
        makes a tensor that, and what its unrouted parts make of it."""
        positional, named = self._given
        if normed is not None:
            self._at_hand = {_NORM: (hidden, normed)}
            for part, output in zip(self.unrouted, created, strict=True):
                self._at_hand[part.method] = normed, output
        self._rest = piece.rest
        if vars(self._apart).get(_SEND) != self._sending:  # others have replaced it
            self._launch_rest()
        try:
            y: Tensor = self._forward_mlp(hidden, *positional, **named)
            if self._rest is not None:
                raise RuntimeError("a layer of experts has sent no tokens to them")
        finally:
            self._at_hand, self._rest = {}, None
        return y

    def _launch_rest(self) -> None:
        rest, self._rest = self._rest, None
        if rest is not None:
            rest.replay()

    def _sending(self, *args: Any, **kwargs: Any) -> Any:
        """MoELayer's method `_SEND`."""
        self._launch_rest()
        return getattr(type(self._apart), _SEND)(self._apart, *args, **kwargs)

    def _of_experts(self, *args: Any, **kwargs: Any) -> Any:
        """Its method `_forward_mlp`."""
        if self._owner.cut is None:
            return self._forward_mlp(*args, **kwargs)
        hidden, *extra = args
        if any(isinstance(value, Tensor) for value in (*extra, *kwargs.values())):
            raise CannotCaptureError(OTHER_LAYER)
        self._given = (*extra,), kwargs
        return self._owner.cut.experts(hidden, self.module.pre_mlp_layernorm, self.unrouted)

    def _at_hand_or(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        """A method whose output a graph has made, for the input that the graph had."""

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if name in self._at_hand and x is self._at_hand[name][0]:
                return self._at_hand[name][1]
            return stock(x, *args, **kwargs)

        return run
