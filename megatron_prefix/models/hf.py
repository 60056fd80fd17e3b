"""Hugging Face `config.json` -> ModelSpec, for the Llama, Qwen2 and Qwen3 families. [pure]

The formats are those of transformers' LlamaConfig, Qwen2Config, Qwen3Config and Qwen3MoeConfig
(transformers/models/*/configuration_*.py), where absent fields have the defaults used here.
Anything that Megatron-Core or the prefix schedule would compute differently is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_prefix.errors import UserError
from megatron_prefix.models.presets import ModelSpec, RopeScaling


class _Config:
    """One config.json; errors name file and field."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self.values = path, values

    def wrong(self, field: str, problem: str) -> UserError:
        """The error for one field."""
        return UserError(f"{self.path}: {field} {problem}")

    def number(self, field: str, default: float | None = None) -> Any:
        """A number; without a default the field is required."""
        value = self.values.get(field)
        if value is None:
            value = default
        if value is None:
            raise self.wrong(field, "is missing; take the config.json that came with the model")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(field, f"is {value!r}, not a number; fix the file")
        return value

    def size(self, field: str, default: int | None = None) -> int:
        """A whole number from 1; without a default the field is required."""
        value = self.number(field, default)
        if not isinstance(value, int) or value < 1:
            raise self.wrong(field, f"is {value!r}, not a whole number from 1; fix the file")
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        """true or false."""
        value = self.values.get(field, default)
        if not isinstance(value, bool):
            raise self.wrong(field, f"is {value!r}, not true or false; fix the file")
        return value

    def only(self, field: str, supported: Any, why: str) -> None:
        """Refuse any value but the supported one; the field may be absent."""
        value = self.values.get(field)
        if value is not None and value != supported:
            raise self.wrong(field, f"{value!r} is not supported ({why}); use {supported!r}")


def load(path: str | Path) -> ModelSpec:
    """The ModelSpec of a config.json, or of the folder that holds one.

    Raises:
        UserError: no such file, not JSON, an unknown model family, a missing field, or a feature
            that is not supported; the message names file, field and fix.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}); take the model's config.json") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no JSON object; take the model's config.json")
    config = _Config(path, values)
    family = values.get("model_type")
    if family not in _FAMILIES:
        raise config.wrong(
            "model_type", f"{family!r} is not supported; use one of {', '.join(_FAMILIES)}"
        )
    return _FAMILIES[family](config)


def _dense(config: _Config, **family: Any) -> ModelSpec:
    """The fields that all families have."""
    config.only("hidden_act", "silu", "the MLP is SwiGLU")
    config.only("attention_bias", False, "Megatron-Core has no bias on the output projection alone")
    config.only("mlp_bias", False, "the MLP has no bias")
    config.only("partial_rotary_factor", 1.0, "RoPE turns the whole head")
    _refuse_sliding_window(config)
    base, scaling = _rope(config)
    heads = config.size("num_attention_heads")
    values: dict[str, Any] = {
        "name": config.path.parent.name or config.path.stem,
        "num_layers": config.size("num_hidden_layers"),
        "hidden_size": config.size("hidden_size"),
        "num_attention_heads": heads,
        "num_query_groups": config.size("num_key_value_heads", heads),
        "kv_channels": config.size("head_dim", config.size("hidden_size") // heads),
        "ffn_hidden_size": config.size("intermediate_size"),
        "vocab_size": config.size("vocab_size"),
        "max_position": config.size("max_position_embeddings", 32768),
        "rotary_base": float(base),
        "rope_scaling": scaling,
        "tie_embeddings": config.flag("tie_word_embeddings"),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "init_std": config.number("initializer_range", 0.02),
    }
    return ModelSpec(**{**values, **family})


def _qwen2(config: _Config) -> ModelSpec:
    return _dense(config, add_qkv_bias=True)


def _qwen3(config: _Config, **family: Any) -> ModelSpec:
    head_dim = config.size("head_dim", 128)
    return _dense(config, kv_channels=head_dim, qk_layernorm=True, **family)


def _qwen3_moe(config: _Config) -> ModelSpec:
    layers, step = config.size("num_hidden_layers"), config.size("decoder_sparse_step", 1)
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(layer, int) for layer in dense):
        raise config.wrong("mlp_only_layers", f"is {dense!r}, not a list of layer numbers")
    # transformers 5 writes the second name, earlier releases the first.
    experts = "num_local_experts" if "num_local_experts" in config.values else "num_experts"
    flags = tuple((n + 1) % step == 0 and n not in dense for n in range(layers))
    return _qwen3(
        config,
        num_experts=config.size(experts),
        moe_ffn_hidden_size=config.size("moe_intermediate_size"),
        moe_top_k=config.size("num_experts_per_tok"),
        moe_normalize_top_k=config.flag("norm_topk_prob"),
        moe_aux_loss_coeff=float(config.number("router_aux_loss_coef", 0.001)),
        moe_layers=None if all(flags) else flags,
    )


_FAMILIES: dict[Any, Callable[[_Config], ModelSpec]] = {
    "llama": _dense,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}


def _refuse_sliding_window(config: _Config) -> None:
    """Qwen configs give a window size even where no layer uses it; the switch decides."""
    why = "a window is not a dense block of attention"
    config.only("use_sliding_window", False, why)
    if "use_sliding_window" not in config.values:
        config.only("sliding_window", None, why)
    for kind in config.values.get("layer_types") or []:
        if kind != "full_attention":
            raise config.wrong(
                "layer_types", f"{kind!r} is not supported ({why}); use 'full_attention'"
            )


def _rope(config: _Config) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_theta` and `rope_scaling` or, since transformers 5, from
    `rope_parameters`."""
    field = "rope_parameters" if config.values.get("rope_parameters") else "rope_scaling"
    values = config.values.get(field) or {}
    if not isinstance(values, dict):
        raise config.wrong(field, f"is {values!r}, not an object; fix the file")
    rope = _Config(config.path, values)
    base = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return base, None
    if kind != "llama3":
        raise config.wrong(
            f"{field}.rope_type", f"{kind!r} is not supported; use 'default' or 'llama3'"
        )
    try:
        return base, RopeScaling(
            factor=float(rope.number("factor")),
            low_freq_factor=float(rope.number("low_freq_factor")),
            high_freq_factor=float(rope.number("high_freq_factor")),
            original_max_position=rope.size("original_max_position_embeddings"),
        )
    except UserError as error:
        raise UserError(f"{config.path}: {field}: {error}") from None
