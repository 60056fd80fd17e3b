"""What the recurrent kinds of layers have in common.  Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from megatron_prefix.errors import Reason
from megatron_prefix.layers.kind import Kind, Slot
from megatron_prefix.plan.footprint import Execution
from megatron_prefix.plan.layer_numbers import LayerMemory, LayerWork, Payload
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
        conv_width: positions that the convolution sees.
        state: numbers in the state.
        scan: multiplications a position without those of the projections.
    """

    projected: tuple[int, ...]
    convolved: tuple[int, ...]
    values: int
    conv_width: int
    state: int
    scan: int


class Recurrent(Kind):
    """A span leaves the state behind its last position, and the convolution's last inputs.

    Attributes:
        module: the name of Megatron's class.
        method: the method of it that segments run; a subclass's own may call other kernels.
        divides: two fields of a config: the first divides the second, and tensor parallelism the
            first.
        hybrid_since, cp_since: the first Megatron-Core whose hybrid models have it, and where it
            has context parallelism.
    """

    slot, form = Slot.MIXER, Form.SPANS
    module: ClassVar[str]
    method: ClassVar[str]
    divides: ClassVar[tuple[str, str]]
    hybrid_since: ClassVar[str] = "0"
    cp_since: ClassVar[str] = "0"

    def shape(self, config: Any) -> Shape:
        """The sizes of a layer; `config` as of Kind.work."""
        raise NotImplementedError

    def saved(self, config: Any, form: Execution) -> float:
        """Bytes a position that all tensor-parallel ranks save for backward; arguments as of
        Kind.memory."""
        raise NotImplementedError

    def of_spans(self, config: Any, form: Execution, tail: float) -> dict[str, float]:
        """`edge` and `batched` of the payload.

        Args:
            config, form: as of Kind.memory.
            tail: numbers in the convolution's last inputs, on one rank.
        """
        raise NotImplementedError

    def work(self, config: Any) -> LayerWork:
        """See Kind."""
        return LayerWork(self._projections(config) + self.shape(config).scan)

    def parameters(self, config: Any) -> int:
        """See Kind."""
        shape = self.shape(config)
        return self._projections(config) + shape.conv_width * sum(shape.convolved)

    def memory(self, config: Any, form: Execution) -> LayerMemory:
        """See Kind; context-parallel ranks have all positions of a part of the heads."""
        shape, size, wide = self.shape(config), form.itemsize, max(4, form.itemsize)
        ranks, saved = form.tp * form.cp, self.saved(config, form) / form.tp
        state = shape.state * wide / ranks
        tail = sum(shape.convolved) * (shape.conv_width - 1) / ranks
        payload = Payload(
            Form.SPANS, state + tail * size, state + tail * wide, state,
            **self.of_spans(config, form, tail),
        )  # fmt: skip
        return LayerMemory(saved, saved, payload=payload)

    def module_of(self, layer: Any) -> Any | None:
        """See Kind."""
        # A mixer: MambaLayer, also of Megatron's other recurrent layers in hybrid models.
        module = getattr(layer, "mixer", None) or getattr(layer, "self_attention", None)
        for base in type(module).__mro__:
            if base.__name__ == self.module and base.__module__.startswith("megatron.core.ssm."):
                own = getattr(type(module), self.method) is vars(base)[self.method]
                return module if own and self.method not in vars(module) else None
        return None

    def option_refusals(self, module: Any, config: Any) -> Iterator[Reason]:
        """See Kind."""
        if getattr(config, "deterministic_mode", False):
            yield DETERMINISTIC.given()

    def _projections(self, config: Any) -> int:
        shape = self.shape(config)
        wide: int = config.hidden_size * (sum(shape.projected) + shape.values)
        return wide
