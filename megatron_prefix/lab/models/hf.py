"""Hugging Face `config.json` -> ModelSpec, of every family that is built. [pure]

The formats are those of transformers' LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig,
Qwen3NextConfig, Qwen3_5Config, Qwen3_5MoeConfig, NemotronHConfig, DeepseekV3Config,
Glm4MoeLiteConfig and GptOssConfig (transformers/models/*/configuration_*.py), where absent fields
have the defaults used here.
Anything that Megatron-Core or the prefix schedule would compute differently is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_prefix.errors import UserError
from megatron_prefix.lab.models import hf_deepseek, hf_gpt_oss, hf_nemotron
from megatron_prefix.lab.models.hf_config import Config, common, key_heads, llama_rope
from megatron_prefix.lab.models.presets import ModelSpec
from megatron_prefix.plan.files import read_text


def load(path: str | Path) -> ModelSpec:
    """The ModelSpec of a config.json, or of the folder that holds one.

    Raises:
        UserError: no such file, not JSON, an unknown model family, a missing field, or a feature
            that is not supported; the message names file, field and fix.
    """
    config = _read(path)
    return family(config)(config)


def model_type(path: str | Path) -> str:
    """The name of the model's family; arguments and errors as of `load`."""
    return str(_read(path).values.get("model_type"))


def _read(path: str | Path) -> Config:
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        values = json.loads(read_text(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not JSON ({error}); take the model's config.json") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no JSON object; take the model's config.json")
    return Config(path, values)


def family(config: Config) -> Callable[[Config], ModelSpec]:
    """What reads a model of this family.

    Raises:
        UserError: it is not known.
    """
    name = config.values.get("model_type")
    if not isinstance(name, str) or name not in _FAMILIES:
        raise config.wrong(
            "model_type", f"{name!r} is not supported; use one of {', '.join(_FAMILIES)}"
        )
    return _FAMILIES[name]


def _dense(config: Config, *, max_position: int = 32768, **family: Any) -> ModelSpec:
    """The fields that all families have.

    Args:
        config: of the model.
        max_position: the family's `max_position_embeddings`.
        family: fields that this one reads otherwise.
    """
    config.only("hidden_act", "silu", "the MLP is SwiGLU")
    config.only("attention_bias", False, "Megatron-Core has no bias on the output projection alone")
    config.only("mlp_bias", False, "the MLP has no bias")
    if "rotary_percent" not in family:
        config.only("partial_rotary_factor", 1.0, "RoPE turns the whole head")
    if "experimental_attention_variant" not in family:
        _refuse_sliding_window(config)
    base, scaling = llama_rope(config)
    heads = config.size("num_attention_heads")
    values: dict[str, Any] = {
        **common(config, max_position=max_position),
        "num_layers": config.size("num_hidden_layers"),
        "num_query_groups": config.size("num_key_value_heads", heads),
        "kv_channels": config.size("head_dim", config.size("hidden_size") // heads),
        "ffn_hidden_size": family.get("ffn_hidden_size") or config.size("intermediate_size"),
        "rotary_base": base,
        "rope_scaling": scaling,
    }
    return ModelSpec(**{**values, **family})


def _llama(config: Config) -> ModelSpec:
    return _dense(config, max_position=2048)


def _qwen2(config: Config) -> ModelSpec:
    return _dense(config, add_qkv_bias=True, num_query_groups=key_heads(config, 32))


def _qwen3(config: Config, **family: Any) -> ModelSpec:
    values = {
        "kv_channels": config.size("head_dim", 128),
        "num_query_groups": key_heads(config, 32),
        "qk_layernorm": True,
    }
    return _dense(config, **{**values, **family})


_LINEAR = [
    field.name for field in fields(ModelSpec) if re.match("linear_.*_(heads|dim)", field.name)
]
"""Fields of GatedDeltaNet with one name in Megatron and in transformers."""


def _gated_delta(config: Config) -> dict[str, Any]:
    """GatedDeltaNet but for every fourth layer, and attention with an output gate."""
    layers, every = config.size("num_hidden_layers"), config.size("full_attention_interval", 4)
    kinds = config.names("layer_types")
    usual = ["linear_attention", "full_attention"]
    if kinds is not None and "full_attention" in kinds:
        every = kinds.index("full_attention") + 1
    if kinds is not None and kinds != [usual[(n + 1) % every == 0] for n in range(layers)]:
        raise config.wrong(
            "layer_types", "are not supported: Megatron-Core has attention in every n-th layer; use"
            " such a model",
        )  # fmt: skip
    config.only("attn_output_gate", True, "attention has an output gate")
    turned = config.inner("rope_parameters").number(
        "partial_rotary_factor", config.number("partial_rotary_factor", 0.25)
    )
    return {
        "num_query_groups": config.size("num_key_value_heads"),  # defaults differ by model
        "kv_channels": config.size("head_dim", 256),
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "rotary_percent": turned,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": every,
        # Absent ones have the same defaults there as here.
        **{name: config.size(name) for name in _LINEAR if config.values.get(name) is not None},
    }


def _qwen3_next(config: Config, **family: Any) -> ModelSpec:
    """Qwen3-Next: shared experts as well."""
    config.only("shared_expert_gate", True, "the shared expert has a gate")
    values = {
        "moe_shared_expert_intermediate_size": config.size("shared_expert_intermediate_size", 512),
        "moe_shared_expert_gate": True,
        "moe_router_pre_softmax": not config.flag("norm_topk_prob", True),
        **_gated_delta(config),
    }
    return _qwen3_moe(config, **{**values, **family})


def _qwen3_5(config: Config) -> ModelSpec:
    return _qwen3(config, **_gated_delta(config))


def _qwen3_5_moe(config: Config) -> ModelSpec:
    """As Qwen3-Next; what the config no longer says is always so."""
    config.only("norm_topk_prob", True, "the weights of a token's experts add up to one")
    config.only("decoder_sparse_step", 1, "every layer has experts")
    config.only("mlp_only_layers", [], "every layer has experts")
    width = config.size("moe_intermediate_size")
    return _qwen3_next(config, moe_router_pre_softmax=False, ffn_hidden_size=width)


def _language_model(config: Config) -> ModelSpec:
    """Of a model that also sees: without what sees."""
    text = config.inner("text_config")
    if text.values.get("model_type") not in [*_FAMILIES]:  # it may be anything, also unhashable
        raise config.wrong("text_config", "is missing or of an unknown family; fix the file")
    # The whole model ties its embeddings, so what it says of them holds.
    tied = config.values.get("tie_word_embeddings")
    values = text.values if tied is None else {**text.values, "tie_word_embeddings": tied}
    return family(text)(Config(config.path, values))


def _qwen3_moe(config: Config, **family: Any) -> ModelSpec:
    layers, step = config.size("num_hidden_layers"), config.size("decoder_sparse_step", 1)
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(layer, int) for layer in dense):
        raise config.wrong("mlp_only_layers", f"is {dense!r}, not a list of layer numbers")
    # transformers 5 writes the second name, earlier releases the first.
    experts = "num_local_experts" if "num_local_experts" in config.values else "num_experts"
    flags = tuple(int((n + 1) % step == 0 and n not in dense) for n in range(layers))
    return _qwen3(
        config,
        num_moe_experts=config.size(experts),
        moe_ffn_hidden_size=config.size("moe_intermediate_size"),
        moe_router_topk=config.size("num_experts_per_tok"),
        moe_aux_loss_coeff=float(config.number("router_aux_loss_coef", 0.001)),
        moe_layer_freq=1 if all(flags) else flags,
        **{
            "num_query_groups": key_heads(config, 4),
            "moe_router_pre_softmax": not config.flag("norm_topk_prob"),
            **family,
        },
    )


_FAMILIES: dict[Any, Callable[[Config], ModelSpec]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _language_model,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe": _language_model,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "nemotron_h": hf_nemotron.nemotron_h,
    "deepseek_v3": hf_deepseek.deepseek_v3,
    "glm4_moe_lite": hf_deepseek.glm4_moe_lite,
    "gpt_oss": hf_gpt_oss.gpt_oss,
}


def _refuse_sliding_window(config: Config) -> None:
    """Qwen configs give a window size even where no layer uses it; the switch decides."""
    why = "the presets of this family have no sliding window"
    config.only("use_sliding_window", False, why)
    if "use_sliding_window" not in config.values:
        config.only("sliding_window", None, why)
    for kind in config.names("layer_types") or ():
        if kind != "full_attention":
            raise config.wrong(
                "layer_types", f"{kind!r} is not supported ({why}); use 'full_attention'"
            )
