"""Hugging Face `config.json` of Nemotron-H -> ModelSpec. [pure]

The format is that of transformers' NemotronHConfig
(transformers/models/nemotron_h/configuration_nemotron_h.py).
"""

from __future__ import annotations

import math
from typing import Any

from megatron_prefix.lab.models.hf_config import Config
from megatron_prefix.lab.models.hf_deepseek import sigmoid_experts
from megatron_prefix.lab.models.presets import ModelSpec

_SYMBOLS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*",
            "mlp": "-", "moe": "E"}  # fmt: skip
"""Names of layers in `layers_block_type`; transformers 5 has the longer ones."""


def _pattern(config: Config) -> str:
    """Symbols of Nemotron-H's layers."""
    kinds = config.names("layers_block_type")
    pattern = config.values.get("hybrid_override_pattern")
    if pattern is None and kinds is not None:
        unknown = [kind for kind in kinds if kind not in _SYMBOLS]
        if unknown:
            raise config.wrong("layers_block_type", _unknown(unknown[0]))
        pattern = "".join(_SYMBOLS[kind] for kind in kinds)
    if not isinstance(pattern, str) or not pattern:
        raise config.wrong("hybrid_override_pattern", "is missing; take the model's config.json")
    if set(pattern) - set(_SYMBOLS.values()):
        raise config.wrong("hybrid_override_pattern", _unknown(pattern))
    return pattern


def nemotron_h(config: Config) -> ModelSpec:
    """Nemotron-H: Mamba2, attention without RoPE, MLPs and experts, each a layer of its own."""
    pattern = _pattern(config)
    config.only("mlp_hidden_act", "relu2", "the MLP is relu(x)^2")
    config.only("mamba_hidden_act", "silu", "Mamba2's convolution ends in SiLU")
    config.only("use_conv_bias", True, "Mamba2's convolution has a bias")
    for field in ("use_bias", "mamba_proj_bias", "mlp_bias", "attention_bias"):
        config.only(field, False, "projections have no bias")
    for field in ("rms_norm_eps", "layer_norm_epsilon"):
        config.only(field, 1e-5, "Megatron-Core's MambaMixer has its own norm with 1e-05")
    # transformers 5 writes infinity as an object.
    if config.values.get("time_step_limit") != [0.0, {"__float__": "Infinity"}]:
        config.only("time_step_limit", [0.0, math.inf], "Megatron-Core limits no time step")
    config.only("conv_kernel", 4, "Megatron-Core's convolution has no other width")
    config.only("num_hidden_layers", len(pattern), "the pattern has as many layers")
    given = _experts(config) if _SYMBOLS["moe"] in pattern else {}
    return ModelSpec(
        **given,
        name=config.path.parent.name or config.path.stem,
        num_layers=len(pattern),
        hidden_size=config.size("hidden_size"),
        num_attention_heads=config.size("num_attention_heads"),
        num_query_groups=config.size("num_key_value_heads"),
        kv_channels=config.size("attention_head_dim" if "attention_head_dim" in config.values
                                else "head_dim", 128),
        ffn_hidden_size=config.size("intermediate_size"),
        vocab_size=config.size("vocab_size"),
        max_position=config.size("max_position_embeddings", 4096),
        rope=False,
        gated_linear_unit=False,
        tie_embeddings=config.flag("tie_word_embeddings"),
        layernorm_epsilon=1e-5,
        init_method_std=config.number("initializer_range", 0.02),
        hybrid_override_pattern=pattern,
        mamba_num_heads=config.size("mamba_num_heads", 128),
        mamba_head_dim=config.size("mamba_head_dim", 64),
        mamba_state_dim=config.size("ssm_state_size", 128),
        mamba_num_groups=config.size("n_groups", 8),
    )  # fmt: skip


def _experts(config: Config) -> dict[str, Any]:
    """Those of Nemotron 3: chosen as DeepSeek-V3's, without gates, beside a shared one."""
    config.only("moe_latent_size", None, "Megatron-Core's experts are as wide as the model")
    config.only("n_shared_experts", 1, "one expert is shared")
    groups, best = config.size("n_group", 1), config.size("topk_group", 1)
    values = sigmoid_experts(config, groups, best, chosen=2, scaling=1.0)
    shared = config.size("moe_shared_expert_intermediate_size")
    return {**values, "moe_shared_expert_intermediate_size": shared}


def _unknown(layer: str) -> str:
    return f"{layer!r} is not supported (M Mamba2, * attention, - MLP and E experts are)"
