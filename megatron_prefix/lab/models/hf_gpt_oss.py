"""Hugging Face `config.json` of gpt-oss -> ModelSpec. [pure]

The format is that of transformers' GptOssConfig
(transformers/models/gpt_oss/configuration_gpt_oss.py).
"""

from __future__ import annotations

from megatron_prefix.lab.models.hf_config import Config, common, rope
from megatron_prefix.lab.models.presets import ModelSpec, YarnScaling

_FULL, _WINDOW = "full_attention", "sliding_attention"


def gpt_oss(config: Config) -> ModelSpec:
    """gpt-oss: windows in every second layer, sinks, and experts with biases and clamped gates."""
    config.only("hidden_act", "silu", "the gate goes through x sigmoid(1.702 x)")
    config.only("swiglu_alpha", 1.702, "the gate goes through x sigmoid(1.702 x)")
    config.only("attention_bias", True, "all projections have biases")
    experts = "num_local_experts" if "num_local_experts" in config.values else "num_experts"
    width, (base, scaling) = config.size("intermediate_size"), _rope(config)
    return ModelSpec(
        **common(config, max_position=131072, epsilon=1e-5),
        num_layers=config.size("num_hidden_layers"),
        num_query_groups=config.size("num_key_value_heads", 8),
        kv_channels=config.size("head_dim", 64),
        ffn_hidden_size=width,
        rotary_base=base,
        rope_scaling=scaling,
        add_bias_linear=True,
        softmax_type="learnable",
        # transformers counts a query's own key, Megatron does not.
        window_size=(config.size("sliding_window", 128) - 1, 0),
        window_attn_skip_freq=_windows(config),
        quick_geglu=True,
        glu_linear_offset=1.0,
        activation_func_clamp_value=float(config.number("swiglu_limit", 7.0)),
        num_moe_experts=config.size(experts),
        moe_ffn_hidden_size=width,
        moe_router_topk=config.size("num_experts_per_tok", 4),
        moe_aux_loss_coeff=float(config.number("router_aux_loss_coef", 0.001)),
    )


def _windows(config: Config) -> int | tuple[int, ...]:
    """Every how many layers there is no window, or a flag a layer."""
    layers = config.size("num_hidden_layers")
    usual = [_FULL if layer % 2 else _WINDOW for layer in range(layers)]
    kinds = config.names("layer_types") or usual
    if kinds == usual:
        return 2
    if len(kinds) != layers or set(kinds) - {_FULL, _WINDOW}:
        raise config.wrong("layer_types", f"is not {_FULL!r} or {_WINDOW!r} for each layer; fix it")
    return tuple(int(kind == _WINDOW) for kind in kinds)


def _rope(config: Config) -> tuple[float, YarnScaling | None]:
    """Base and scaling, which transformers has if the file says nothing."""
    field, values, _, kind = found = rope(config)
    base = float(values.number("rope_theta", config.number("rope_theta", 150000.0)))
    if not config.values.get(field):
        return base, YarnScaling(32.0, rounds=False)
    if kind == "default":
        return base, None
    if kind != "yarn":
        raise found.wrong("'default' or 'yarn'")
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        values.only(name, None, "the attention factor follows from the scaling factor")
    original = values.size("original_max_position_embeddings")
    return base, YarnScaling(
        float(values.number("factor")),
        original,
        float(values.number("beta_fast", 32.0)),
        float(values.number("beta_slow", 1.0)),
        values.flag("truncate", True),
    )
