"""What the recurrent kinds of layers have in common.  Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from megatron_prefix.errors import Reason
from megatron_prefix.layers.kind import Kind, Slot
from megatron_prefix.plan.layer_numbers import LayerWork, Payload, Sharding
from megatron_prefix.refusals.table import DETERMINISTIC
from megatron_prefix.tree.payload_map import Form

CHUNK = 64
"""Positions that the kernels compute at once by matrix products."""


class Shape(NamedTuple):
    """The sizes of a recurrent layer.

    Attributes:
        projected: rows of the input projection, part by part.
        convolved: channels of the convolution, part by part.
        values: channels of the output projection.
        scan: multiplications a position without those of the projections.
    """

    projected: tuple[int, ...]
    convolved: tuple[int, ...]
    values: int
    conv_width: int
    state: int
    scan: int

    @property
    def rows(self) -> int:
        return sum(self.projected) + self.values

    @property
    def tail(self) -> int:
        return sum(self.convolved) * (self.conv_width - 1)


class Recurrent(Kind):
    """A span leaves the state behind its last position, and the convolution's last inputs.

    Attributes:
        method: the method of it that segments run; a subclass's own may call other kernels.
        divides: two fields of a config: the first divides the second, and tensor parallelism the
            first.
        cut: positions that its kernels take at once; at multiples of it a shared prompt is bitwise
            the unshared one. None if that is so anywhere.
        hybrid_since, cp_since: the first Megatron-Core whose hybrid models have it, and where it
            has context parallelism.
    """

    slot, form = Slot.MIXER, Form.SPANS
    module: ClassVar[str]
    method: ClassVar[str]
    divides: ClassVar[tuple[str, str]]
    cut: ClassVar[int | None] = None
    hybrid_since: ClassVar[str] = "0"
    cp_since: ClassVar[str] = "0"

    def shape(self, config: Any) -> Shape:
        raise NotImplementedError

    def parameters(self, config: Any) -> int:
        shape = self.shape(config)
        weights: int = config.hidden_size * shape.rows + shape.conv_width * sum(shape.convolved)
        return weights

    def work(self, config: Any) -> LayerWork:
        shape = self.shape(config)
        return LayerWork(config.hidden_size * shape.rows + shape.scan)

    def payload(self, config: Any, sharding: Sharding) -> Payload:
        """See Kind: the state in fp32 or wider, and the tail; ranks have a part of the heads."""
        shape, size, ranks = self.shape(config), sharding.itemsize, sharding.tp * sharding.cp
        state, tail = shape.state / ranks * max(4, size), shape.tail / ranks
        return Payload(Form.SPANS, state + tail * size, state + tail * max(4, size))

    def module_of(self, layer: Any) -> Any | None:
        # A mixer: MambaLayer, also of Megatron's other recurrent layers in hybrid models.
        module = getattr(layer, "mixer", None) or getattr(layer, "self_attention", None)
        for base in type(module).__mro__:
            if base.__name__ == self.module and base.__module__.startswith("megatron.core.ssm."):
                is_megatrons = self.knows(type(module), base) and self.method not in vars(module)
                return module if is_megatrons else None
        return None

    def knows(self, own: type, base: type) -> bool:
        """Whether the method of a module's class is known.

        Args:
            base: Megatron's, which it is or comes from.
        """
        return getattr(own, self.method) is vars(base)[self.method]

    def option_refusals(self, module: Any, config: Any) -> Iterator[Reason]:
        if getattr(config, "deterministic_mode", False):
            yield DETERMINISTIC.given()
