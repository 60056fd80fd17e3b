"""Computation of one slot of a layer, and what a span leaves in it, as numbers.  Pure.

Every kind of layer states its own (layers/kind.py); this folder only adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_prefix.tree.payload_map import Form


@dataclass(frozen=True)
class LayerWork:
    """Multiplications of a forward, each of two FLOPs, and what the host does for it.

    Attributes:
        products: a position, in matrix products.
        pairs: a visible (query, key) pair.
        seen: an ancestor's position that a segment sees, in matrix products that make its keys and
            values once more.
        launches: how long the host takes, beside all of a layer of attention and an MLP.
    """

    products: float
    pairs: float = 0.0
    seen: float = 0.0
    launches: float = 0.5

    def at(self, rate: float) -> LayerWork:
        """With matrix products `rate` times as fast as those of pairs."""
        return replace(self, products=self.products / rate, seen=self.seen / rate)


@dataclass(frozen=True)
class Payload:
    """What a span leaves for its children, in bytes on one rank.

    Attributes:
        form: whether a row is a position's or a span's.
        values: a row in the sidecar.
        gradients: a row of its gradient there.
    """

    form: Form
    values: float
    gradients: float

    @classmethod
    def of(cls, form: Form, numbers: float, size: int) -> Payload:
        """Of rows of so many numbers of `size` bytes; gradients are summed in fp32 or wider."""
        return cls(form, numbers * size, numbers * max(4, size))


class Sharding(NamedTuple):
    """How a rank's part of a layer is cut, and in what it computes: tensor- and context-parallel
    ranks, and bytes of a number."""

    tp: int = 1
    cp: int = 1
    itemsize: int = 2
