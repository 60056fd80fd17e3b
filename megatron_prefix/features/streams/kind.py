"""Hyper-connections: layers have several residual streams, and mix them.  Pure.

A position's mixing looks at nothing but its own streams, so segments run it as it is, and a span
leaves nothing in it. A model begins and ends with one; pipeline stages send all of them.
"""

from __future__ import annotations

from typing import Any

from megatron_prefix.layers.kind import Kind, Slot

NUMBER = ("mhc_num_residual_streams", "num_residual_streams")
"""Fields of Megatron's config that have their number, of its main branch and of its dev branch."""


class Streams(Kind):
    """What is around both slots of every layer."""

    name, symbol, slot = "hyper-connections", "", Slot.MIXER

    def module_of(self, layer: Any) -> None:
        """See Kind: it fills no slot."""

    def states_sent(self, config: Any, layers: int) -> int:
        """See Kind."""
        return next(getattr(config, name) for name in NUMBER if hasattr(config, name))
