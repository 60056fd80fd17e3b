"""Experts: their routers count every rollout that a token of a segment stands for.  Pure.

Their segments run in routing.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from megatron_prefix.errors import Reason
from megatron_prefix.layers.kind import Kind, Override, Running, Slot
from megatron_prefix.layers.mlp import matrices
from megatron_prefix.layers.model import balancing
from megatron_prefix.plan.layer_numbers import LayerWork
from megatron_prefix.refusals.table import OTHER_ROUTER

LAUNCHES = 10.0
"""See LayerWork: the host waits for the device in every layer, as it needs the tokens of each
expert, and launches as many products (benchmarks/LOG.md, "Experts")."""


class Experts(Kind):
    """Megatron's mixture of experts, whose router is a TopKRouter."""

    name, symbol, slot = "experts", "E", Slot.MLP

    def fills(self, config: Any, layer: int) -> bool:
        """See Kind; as in megatron/core/models/gpt/gpt_layer_specs.py."""
        if not getattr(config, "num_moe_experts", None):
            return False
        every = getattr(config, "moe_layer_freq", 1)
        return layer % every == 0 if isinstance(every, int) else bool(every[layer])

    def module_of(self, layer: Any) -> Any | None:
        module = getattr(layer, "mlp", None)
        return module if hasattr(module, "router") else None

    def work(self, config: Any) -> LayerWork:
        """See Kind; those count that a token visits, and shared ones."""
        width, shared = expert_widths(config)
        width = width * config.moe_router_topk + shared
        return LayerWork(matrices(config) * config.hidden_size * width, launches=LAUNCHES)

    def parameters(self, config: Any) -> int:
        """See Kind; of all experts, the router, and the gate of shared ones."""
        width, shared = expert_widths(config)
        gate = bool(shared and getattr(config, "moe_shared_expert_gate", False))
        always = matrices(config) * shared + gate
        an_expert = matrices(config) * width + 1
        weights: int = ((config.num_moe_experts or 0) * an_expert + always) * config.hidden_size
        return weights

    def counts(self, config: Any) -> bool:
        """See Kind: losses of routers, and their bias by load."""
        others = "moe_router_enable_expert_bias", "moe_z_loss_coeff"
        return bool(balancing(config)) or any(getattr(config, name, None) for name in others)

    def refusals(self, number: int, module: Any, model: Any) -> Iterator[Reason]:
        from megatron.core.transformer.moe.router import TopKRouter

        if not isinstance(module.router, TopKRouter):
            yield OTHER_ROUTER.given(number, type(module.router).__name__)

    def overrides(self, module: Any, number: int, running: Running) -> Iterable[Override]:
        from megatron_prefix.features.experts.routing import in_segments

        methods = in_segments(module.router, number, running)
        return [(module.router, name, method) for name, method in methods.items()]


def expert_widths(config: Any) -> tuple[int, int]:
    """Of one expert, and of what all tokens go through."""
    shared = getattr(config, "moe_shared_expert_intermediate_size", None) or 0
    return config.moe_ffn_hidden_size or config.ffn_hidden_size, shared
