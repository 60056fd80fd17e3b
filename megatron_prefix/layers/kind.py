"""What a kind of layer says of itself: one file of this folder, and one line of table.py.

A kind fills a slot of Megatron's layers: it mixes positions, or it works on each of them. It says
which of Megatron's modules it is, what of that module is refused, what it computes and saves, what
a span leaves for its children in it (its payload), and which methods of the module a segment needs.
Pure: kinds import torch and Megatron where they hook a model, since a plan needs neither.

What takes a `config` reads fields of Megatron's TransformerConfig; a ModelSpec of the lab has them,
too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from megatron_prefix.errors import Reason
from megatron_prefix.plan.layer_numbers import LayerWork, Payload, Sharding
from megatron_prefix.tree.cp_layout import Slices
from megatron_prefix.tree.payload_map import Form

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_prefix.layers.blocks.interface import Kernel
    from megatron_prefix.layers.blocks.rotary import Rotary
    from megatron_prefix.layers.segment import SegmentContext

Override = tuple[Any, str, Callable[..., Any]]
"""An object, the name of its method, and what takes its place."""


class Heads(NamedTuple):
    """Attention heads of a tensor-parallel rank.

    Attributes:
        num: of queries.
        group: of these, that have keys and values in common.
        width: of a query and a key.
        value_width: of a value.
    """

    num: int
    group: int
    width: int
    value_width: int


class Slot(Enum):
    """A place in one of Megatron's layers."""

    MIXER = "mixer"
    MLP = "mlp"


class Tap(Protocol):
    """What takes a layer's core apart from what is before and behind it in the layer."""

    def __call__(
        self,
        run: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        shape: Sequence[int],
        passing: Sequence[Tensor] = (),
    ) -> Tensor:
        """In the place of the core, which does not run now.

        Args:
            run: the core: (tensors as in `inputs` and `passing`, into=where its output is to be, or
                elsewhere) -> its output. It uses parameters as they are in their modules then.
            inputs: what it is given, as many numbers a position of each in every segment.
            shape: of its output, in the dtype of the first that it is given.
            passing: what it is given besides, and keeps nothing of.

        Returns:
            A tensor of that shape, where its output will be.
        """
        ...


class Running(Protocol):
    """What the hooks of a model chunk know of the step that runs.

    Attributes:
        tap: called where a layer's core begins, in its place; None: the core runs.
        mlp_tap: (module, its arguments, those by name) -> output of an MLP, in place of its
            forward; None: that runs.
        angles: what its layers may be given of rotary embeddings, [positions, 1, 1, width] if they
            are; while a segment runs.
    """

    current: SegmentContext | None
    tap: Tap | None
    mlp_tap: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any] | None
    packed: bool
    kernels: dict[int | None, Kernel]
    rotary: Rotary
    angles: Tensor | None


class Kind:
    """A kind of layer.

    Attributes:
        symbol: in the pattern of a hybrid model, as in Megatron's
            megatron/core/ssm/mamba_hybrid_layer_allocation.py.
        has_window: whether its queries see a window of positions, by the config's `window_size`.
        slices: how its modules want calls to be cut for context-parallel ranks.
    """

    name: ClassVar[str]
    symbol: ClassVar[str]
    slot: ClassVar[Slot]
    form: ClassVar[Form | None] = None
    has_window: ClassVar[bool] = False
    slices: ClassVar[Slices] = Slices.ZIGZAG

    def fills(self, config: Any, layer: int) -> bool:
        """Whether it fills its slot in a layer of a GPTModel, counted from 0, unless a kind before
        it in the table does; hybrid models name their kinds by symbol."""
        return False

    def is_behind(self, config: Any) -> bool:
        """Whether a model has it behind its decoder, around one more of the decoder's last layer,
        and with the output layer once more; such a kind fills no slot."""
        return False

    def parameters(self, config: Any) -> int:
        raise NotImplementedError

    def work(self, config: Any) -> LayerWork:
        """What a layer computes: with every position once each weight, unless a kind says more."""
        return LayerWork(self.parameters(config))

    def payload(self, config: Any, sharding: Sharding) -> Payload | None:
        """What a span leaves for its children in a layer; None: nothing."""
        return None

    def states_sent(self, config: Any, layers: int) -> int:
        """Hidden states of a position that a pipeline stage gives to the next one, behind so many
        layers of the model."""
        return 1

    def counts(self, config: Any) -> bool:
        """Whether a step counts positions without loss, too: in other losses, or a bias by load."""
        return False

    def dropped(self, config: Any, sharding: Sharding) -> float:
        """Bytes a position on one rank that need not be kept, as memory policy "recompute_act"
        makes them again."""
        return 0.0

    def form_in(self, module: Any) -> Form | None:
        """Rows of a module's payload: `form`, unless they depend on the module."""
        return self.form

    def window(self, module: Any) -> int | None:
        """Positions before its own that a query of a module sees; None: all, or it has no
        queries."""
        return None

    def heads(self, config: Any) -> Heads | None:
        """Heads of its attention, whose blocks kernels run; None if it has none in this model."""
        return None

    def module_of(self, layer: Any) -> Any | None:
        """Megatron's module of this kind in one of Megatron's layers; None if it has none.

        Modules are told by name: importing them would need their kernels.
        """
        raise NotImplementedError

    def told(self, layer: Any) -> dict[str, Any]:
        """Fields of a config that a module of this kind in one of Megatron's layers tells, where
        Megatron's config does not have them; the same on every stage."""
        return {}

    def refusals(self, number: int, module: Any, model: Any) -> Iterator[Reason]:
        """What is refused of a module, for good; looked at before the first step."""
        yield from ()

    def option_refusals(self, module: Any, config: Any) -> Iterator[Reason]:
        """What is refused of options that Megatron reads in every forward; so in every step."""
        yield from ()

    def overrides(self, module: Any, number: int, running: Running) -> Iterable[Override]:
        """Methods of instances, and what takes their place; outside of segments they are as before.

        Args:
            number: of the layer in the sidecar if the kind leaves a payload, else in the model
                chunk.
        """
        return ()


class Part(NamedTuple):
    """What fills a slot of a layer."""

    kind: Kind | None
    module: Any = None


_MEGATRON = "megatron.core."
PATCHES = {"verl.models.mcore.patch", "mcore_bridge.patcher"}
"""Modules of trainers that put methods into Megatron's classes which follow the same rule as those;
another one adds its name."""


def owner(module: Any, method: str, patches: Collection[str] = PATCHES) -> str:
    """The full name of the class that defines a method of a module; "" if none does, if the
    instance has another, or if somebody who is not among `patches` has put another into a class of
    Megatron's."""
    if method in vars(module):
        return ""
    for base in type(module).__mro__:
        if method in vars(base):
            written = _written_in(vars(base)[method])
            replaced = base.__module__.startswith(_MEGATRON) and written != base.__module__
            if replaced and written not in patches:
                return ""
            return f"{base.__module__}.{base.__qualname__}"
    return ""


def _written_in(method: Any) -> str:
    """The module that a method in a class was written in; "" if it does not say so.

    What Megatron or torch wrap around it (a cache, a compiler, marks for a profiler) counts as it.
    What others do may change what it is given or gives: `functools.wraps` copies names of what is
    inside, but not the module whose globals the wrapper has.
    """
    while (inside := getattr(method, "__wrapped__", None)) is not None:
        home = getattr(method, "__globals__", {}).get("__name__", "")
        if home and not home.startswith((_MEGATRON, "torch.")):
            return str(home)
        method = inside
    return getattr(method, "__module__", None) or ""
