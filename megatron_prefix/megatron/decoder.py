"""What a language model's decoder says of its layers: their pattern, and what it recomputes."""

from __future__ import annotations

from typing import Any


def pattern_of(model: Any) -> str:
    """Symbols of all layers of a hybrid language model, on every stage; "" for another."""
    own = getattr(model, "hybrid_layer_pattern", None)  # since 0.17; MTP is behind a slash
    pattern = own or getattr(model, "hybrid_override_pattern", None) or ""
    pattern = pattern.partition("/")[0].replace("|", "")
    attention = getattr(model, "hybrid_attention_ratio", None)
    if pattern or attention is None:
        return pattern
    # 0.16 has ratios as well, and its decoder keeps the layers of its own stage only.
    from megatron.core.ssm.mamba_hybrid_layer_allocation import allocate_layers

    mlp = getattr(model, "hybrid_mlp_ratio", 0.0)
    return "".join(allocate_layers(model.config.num_layers, attention, mlp))


def recomputes(model: Any) -> bool:
    """Whether a language model follows `recompute_granularity` "full": Mamba's decoder does so
    since 0.18."""
    for base in type(model.decoder).__mro__:
        # Since 0.18 a function of megatron.core.recompute, before a method.
        called = getattr(vars(base).get("forward"), "__globals__", {})
        if "checkpointed_forward" in called or "_checkpointed_forward" in vars(base):
            return True
    return False
