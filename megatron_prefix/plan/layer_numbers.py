"""Computation and memory of one slot of a layer, as numbers.  Pure.

Every kind of layer states its own (layers/kind.py); this folder only adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
        initial: saved for a span with a parent, whose payload it begins with.
        edge: saved for any span: its first positions once more.
        batched: saved for a position, not a span, where a batch of spans has a row for each, as
            long as the longest (tree/payload_map.py, `length_batches`); 0 elsewhere.
    """

    form: Form
    values: float
    gradients: float
    initial: float = 0.0
    edge: float = 0.0
    batched: float = 0.0
