"""Shared experts, which CUDA graphs run in front of the others.

Every token goes through them, so they are the same launches in every segment of a length. Routers
are in no graph: what a segment's tokens count for losses and biases is added to the ledger of the
step between their launches (layers/routing.py), and a replay would neither repeat nor move that.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_prefix.layers.kind import owner

_MEGATRONS = "megatron.core.transformer.moe."


class EarlyShared:
    """Megatron's shared experts for CUDA graphs; see Early. What they give is only added to what
    other experts give, so nobody keeps it.

    Args:
        module: a SharedExpertMLP.
    """

    kept = False

    def __init__(self, module: Any) -> None:
        self.module, self._forward = module, module.forward

    def make(self, x: Tensor) -> Tensor:
        """See Early."""
        made: Tensor = self._forward(x)
        return made


def early_parts(module: Any) -> list[EarlyShared]:
    """What of an MoELayer CUDA graphs run: its shared experts, unless they run within the dispatch
    of tokens, or the forward of one of both is not Megatron's."""
    shared = getattr(module, "shared_experts", None)
    if shared is None or getattr(module, "shared_expert_overlap", False):
        return []
    known = owner(module, "forward") == f"{_MEGATRONS}moe_layer.MoELayer"
    known = known and owner(shared, "forward") == f"{_MEGATRONS}shared_experts.SharedExpertMLP"
    return [EarlyShared(shared)] if known else []
