"""Hugging Face `config.json` of models with multi-latent attention -> ModelSpec. [pure]

DeepSeek-V3 and what has its format (Moonlight), and GLM-4.7-Flash, as transformers computes them
(transformers/models/deepseek_v3/modeling_deepseek_v3.py), but for the epsilon of the latents'
norms: there it is 1e-06 whatever `rms_norm_eps` says, in Megatron-Core that of all norms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_prefix.lab.models.hf_config import Config, common, rope
from megatron_prefix.lab.models.presets import ModelSpec


class _Defaults(NamedTuple):
    """What a family's configuration class has where config.json says nothing."""

    n_group: int
    topk_group: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    q_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float


_DEEPSEEK_V3 = _Defaults(8, 4, 8, 2.5, 1536, 128, 128, 4096, 1e-6)
_GLM4_MOE_LITE = _Defaults(1, 1, 4, 1.8, 768, 192, 256, 202752, 1e-5)


def deepseek_v3(config: Config) -> ModelSpec:
    """DeepSeek-V3, Moonlight."""
    layers, dense = config.size("num_hidden_layers"), config.number("first_k_dense_replace", 3)
    config.only("moe_layer_freq", 1, "all layers behind the dense ones have experts")
    config.only("scoring_func", "sigmoid", "experts are chosen by sigmoid scores")
    config.only("topk_method", "noaux_tc", "experts are chosen by scores with a bias")
    flags = tuple(int(layer >= dense) for layer in range(layers))
    return _latent(config, flags, _DEEPSEEK_V3)


def glm4_moe_lite(config: Config) -> ModelSpec:
    """GLM-4.7-Flash."""
    layers, kinds = config.size("num_hidden_layers"), config.names("mlp_layer_types")
    if kinds is None:
        kinds = ["dense"] + ["sparse"] * (layers - 1)
    if set(kinds) - {"dense", "sparse"} or len(kinds) != layers:
        raise config.wrong("mlp_layer_types", "is not 'dense' or 'sparse' for each layer; fix it")
    config.only("partial_rotary_factor", 1.0, "RoPE turns its whole part of a head")
    rope(config).values.only("partial_rotary_factor", 1.0, "RoPE turns its whole part of a head")
    flags = tuple(int(kind == "sparse") for kind in kinds)
    return _latent(config, flags, _GLM4_MOE_LITE)


def _latent(config: Config, flags: tuple[int, ...], defaults: _Defaults) -> ModelSpec:
    """Args:
    flags: which layers have experts.
    """
    config.only("hidden_act", "silu", "the MLP is SwiGLU")
    config.only("attention_bias", False, "Megatron-Core's projections to latents have no bias")
    config.only("rope_interleave", True, "Megatron-Core turns neighbours in the weights' order")
    heads = config.size("num_attention_heads")
    rank = config.values.get("q_lora_rank", defaults.q_lora_rank)
    config.only("num_key_value_heads", heads, "every head has its own keys")
    values_dim = config.size("v_head_dim", defaults.v_head_dim)
    experts = _experts(config, defaults) if any(flags) else {}
    return ModelSpec(
        **common(
            config,
            max_position=defaults.max_position_embeddings,
            epsilon=defaults.rms_norm_eps,
        ),
        **_rope(config),
        **experts,
        num_layers=len(flags),
        moe_layer_freq=flags if any(flags) else 1,
        num_query_groups=heads,
        kv_channels=values_dim + values_dim % 2,
        ffn_hidden_size=config.size("intermediate_size"),
        qk_layernorm=True,
        multi_latent_attention=True,
        q_lora_rank=None if rank is None else config.size("q_lora_rank", defaults.q_lora_rank),
        kv_lora_rank=config.size("kv_lora_rank", 512),
        qk_head_dim=config.size("qk_nope_head_dim", defaults.qk_nope_head_dim),
        qk_pos_emb_head_dim=config.size("qk_rope_head_dim", 64),
        v_head_dim=values_dim,
    )


def _experts(config: Config, defaults: _Defaults) -> dict[str, Any]:
    groups = config.size("n_group", defaults.n_group)
    best = config.size("topk_group", defaults.topk_group)
    chosen, scaling = defaults.num_experts_per_tok, defaults.routed_scaling_factor
    return sigmoid_experts(config, groups, best, chosen, scaling)


def sigmoid_experts(
    config: Config, groups: int, best: int, chosen: int, scaling: float
) -> dict[str, Any]:
    """Fields of experts chosen by sigmoid scores, a bias and groups.

    Args:
        groups, best: of experts, and how many of them a token's experts are chosen from.
        chosen, scaling: the family's `num_experts_per_tok` and `routed_scaling_factor`.
    """
    config.only("norm_topk_prob", True, "the weights of a token's experts add up to one")
    chosen, width = config.size("num_experts_per_tok", chosen), config.size("moe_intermediate_size")
    if chosen == 1:
        raise config.wrong("num_experts_per_tok", "1 is not supported: Megatron-Core does not scale"
                           " the weight of a single expert to one; use 2 or more")  # fmt: skip
    if groups > 1 and chosen // best != 2:
        raise config.wrong(
            "topk_group",
            f"{best} with num_experts_per_tok {chosen} is not supported: Megatron-Core judges a"
            " group by as many experts as a token has in it, transformers by two",
        )  # fmt: skip
    shared = config.size("n_shared_experts", 1) if config.values.get("n_shared_experts", 1) else 0
    return {
        "num_moe_experts": config.size("n_routed_experts"),
        "moe_ffn_hidden_size": width,
        "moe_router_topk": chosen,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": best if groups > 1 else None,
        "moe_shared_expert_intermediate_size": width * shared if shared else None,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": float(config.number("routed_scaling_factor", scaling)),
        # transformers has no such loss; the files say it.
        "moe_router_load_balancing_type": (
            "seq_aux_loss" if config.flag("seq_aux", True) else "aux_loss"
        ),
        "moe_aux_loss_coeff": float(config.number("aux_loss_alpha", 0.0)),
    }


def _rope(config: Config) -> dict[str, Any]:
    """RoPE or YaRN, whose attention factor is that of `mscale` over that of `mscale_all_dim`; if
    these are not given, that of 1."""
    field, values, base, kind = found = rope(config)
    if kind == "default":
        return {"rotary_base": base, "rope_type": "rope"}
    if kind != "yarn":
        raise found.wrong("'default' or 'yarn'")
    values.only("attention_factor", None, "it follows from mscale and mscale_all_dim")
    values.only("truncate", True, "Megatron-Core rounds where scaling begins and ends")
    original = values.size("original_max_position_embeddings")
    factor = values.number("factor", config.size("max_position_embeddings", 4096) / original)
    mscale, all_dim = values.number("mscale", 0), values.number("mscale_all_dim", 0)
    if all_dim and not mscale:
        raise config.wrong(f"{field}.mscale", "is missing beside mscale_all_dim; give both")
    return {
        "rotary_base": base,
        "rope_type": "yarn",
        "rotary_scaling_factor": float(factor),
        "original_max_position_embeddings": original,
        "beta_fast": float(values.number("beta_fast", 32.0)),
        "beta_slow": float(values.number("beta_slow", 1.0)),
        "mscale": float(mscale) if all_dim else 1.0,
        "mscale_all_dim": float(all_dim),
    }
