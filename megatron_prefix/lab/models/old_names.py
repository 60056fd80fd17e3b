"""Fields of ModelSpec under the names they had before they took Megatron's. [pure]

Scripts have them in --set, and checkpoints of runs in train.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_prefix.lab.models.presets import ModelSpec

RENAMED = {
    "num_experts": "num_moe_experts",
    "moe_top_k": "moe_router_topk",
    "moe_load_balancing": "moe_router_load_balancing_type",
    "moe_normalize_top_k": "not moe_router_pre_softmax",
    "moe_shared_width": "moe_shared_expert_intermediate_size",
    "norm_eps": "layernorm_epsilon",
    "init_std": "init_method_std",
    "output_gate": "attention_output_gate",
    "squared_relu": "not gated_linear_unit",
}
"""Old name: the new one, after "not" if the value is the opposite."""
_OF_SHAPE = {
    "pattern": "hybrid_override_pattern",
    "attention_every": "linear_attention_freq",
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "state_dim": "mamba_state_dim",
    "groups": "mamba_num_groups",
}
"""The same of the shape of recurrent layers, which was one field, `recurrent`."""


def new_name(name: str) -> str:
    """The name of a field today."""
    return RENAMED.get(name, name).removeprefix("not ")


def new_value(name: str, value: Any) -> Any:
    """The value under the new name of what is called `name`."""
    return not value if RENAMED.get(name, name).startswith("not ") else value


def updated(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved spec (`dataclasses.asdict`) with today's fields, whichever it had."""
    if "num_layers" not in saved:
        return dict(saved)  # of no spec
    values = {field.name: field.default for field in dataclasses.fields(ModelSpec)}
    # Shared experts had a gate before that was a field.
    shared = ("moe_shared_expert_intermediate_size", "moe_shared_width")
    values["moe_shared_expert_gate"] = any(saved.get(name) is not None for name in shared)
    if "num_experts" not in saved:
        return {**values, **saved}
    for name, value in saved.items():
        if name not in ("recurrent", "moe_layers"):
            values[new_name(name)] = new_value(name, value)
    if saved.get("moe_layers"):
        values["moe_layer_freq"] = [int(flag) for flag in saved["moe_layers"]]
    shape = saved.get("recurrent") or {}
    values |= {new: shape[old] for old, new in _OF_SHAPE.items() if old in shape}
    if "key_heads" in shape:  # GatedDeltaNet; Megatron's Mamba2 has one width of convolution
        values["linear_conv_kernel_dim"] = shape["conv_width"]
        values["experimental_attention_variant"] = "gated_delta_net"
    return values
