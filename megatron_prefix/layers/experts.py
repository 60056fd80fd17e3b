"""Experts: their routers count every rollout that a token of a segment stands for.  Pure.

Their segments run in layers/routing.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from megatron_prefix.errors import Reason
from megatron_prefix.layers import precision
from megatron_prefix.layers.kind import Kind, Override, Running, Slot
from megatron_prefix.layers.mlp import matrices, numbers_between, saving
from megatron_prefix.plan.footprint import Execution
from megatron_prefix.plan.layer_numbers import LayerMemory, LayerWork
from megatron_prefix.refusals.table import OTHER_ROUTER

LAUNCHES = 10.0
"""See LayerWork: the host waits for the device in every layer, as it needs the tokens of each
expert, and launches as many products (benchmarks/LOG.md, 2026-11-25, Moonlight)."""


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
        width, shared = _expert_widths(config)
        width = width * config.moe_router_topk + shared
        return LayerWork(matrices(config) * config.hidden_size * width, launches=LAUNCHES)

    def parameters(self, config: Any) -> int:
        """See Kind; of all experts, the router, and the gate of shared ones."""
        width, shared = _expert_widths(config)
        gate = bool(shared and getattr(config, "moe_shared_expert_gate", False))
        always = matrices(config) * shared + gate
        an_expert = matrices(config) * width + 1
        weights: int = ((config.num_moe_experts or 0) * an_expert + always) * config.hidden_size
        return weights

    def memory(self, config: Any, form: Execution) -> LayerMemory:
        """See Kind. Every expert gets a copy of the input and weighs what its second product gets,
        in the kernel of the activation function if there is one; routers save scores, and count all
        positions. Megatron's `recompute_modules` has "mlp" for dense ones, and "moe_act" for the
        activation functions of routed ones.
        What the norm in front gives is in no product alone. All tokens go through shared ones,
        which run first: in a backward what the others save has gone when they run again."""
        width = _expert_widths(config)[0] / form.tp
        cut = getattr(config, "expert_tensor_parallel_size", None) or form.tp
        copied, copies = config.hidden_size * cut / form.tp, config.moe_router_topk
        scores = 3 * (config.num_moe_experts or 0) / form.sequence_ranks
        inside = numbers_between(width, config, form) + width * (not form.fused_activation)
        numbers = copies * (copied + inside) + scores
        less = precision.less(copies * (copied + width), config, form)
        memory = saving(numbers * form.itemsize - less, numbers, config, form)
        shared = _of_shared(config, form)
        run = memory.inner + shared * (not form.selects("shared_experts"))
        # What activation functions save and give, besides what they get.
        act = copies * (inside - width * (1 + config.gated_linear_unit)) * form.itemsize
        act -= precision.less(copies * width, config, form)
        saved = (run - act * form.selects("moe_act")) * (not form.selects("moe"))
        return replace(memory, inner=saved, wave=saved, again=max(run, shared) - saved)

    def refusals(self, number: int, module: Any, model: Any) -> Iterator[Reason]:
        from megatron.core.transformer.moe.router import TopKRouter

        if not isinstance(module.router, TopKRouter):
            yield OTHER_ROUTER.given(number, type(module.router).__name__)

    def overrides(self, module: Any, number: int, running: Running) -> Iterable[Override]:
        from megatron_prefix.layers.routing import in_segments

        methods = in_segments(module.router, number, running)
        return [(module.router, name, method) for name, method in methods.items()]


def _of_shared(config: Any, form: Execution) -> float:
    """Bytes a position that shared experts save, without their input, unless it is gathered outside
    of their product; a gate saves what it is made of, and what it multiplies."""
    _, shared = _expert_widths(config)
    if not shared:
        return 0.0
    width = shared / form.tp
    numbers = numbers_between(width, config, form)
    if getattr(config, "moe_shared_expert_gate", False):
        numbers += config.hidden_size / form.sequence_ranks + 1
    if form.sequence_parallel and getattr(config, "moe_shared_expert_overlap", False):
        numbers += config.hidden_size
    return numbers * form.itemsize - precision.less(width, config, form)


def _expert_widths(config: Any) -> tuple[int, int]:
    shared = getattr(config, "moe_shared_expert_intermediate_size", None) or 0
    return config.moe_ffn_hidden_size or config.ffn_hidden_size, shared
