"""What the layers of a model mix positions with: attention, a recurrence, or nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

RECURRENT = {"GatedDeltaNet": "forward", "MambaMixer": "_ssm_training"}
"""Megatron's recurrent modules (megatron/core/ssm), and the method whose kernels are replaced."""


class Mixer(NamedTuple):
    """What one layer mixes positions with.

    Attributes:
        kind: "attention", "GatedDeltaNet", "MambaMixer", or "" for nothing.
        module: the self-attention, the recurrent module, or None.
    """

    kind: str
    module: Any = None


def mixer_of(layer: Any) -> Mixer | None:
    """The mixer of one of Megatron's layers; None where it is not known.

    Modules are told by name: importing them would need their kernels.
    """
    if hasattr(layer, "mixer"):  # MambaLayer; also Megatron's recurrent layers in hybrid models
        return _recurrent(layer.mixer)
    attention = getattr(layer, "self_attention", None)
    if hasattr(attention, "core_attention"):
        return Mixer("attention", attention)
    if attention is None or type(attention).__name__ == "IdentityOp":
        return Mixer("") if hasattr(layer, "mlp") else None
    return _recurrent(attention)


def _recurrent(module: Any) -> Mixer | None:
    for base in type(module).__mro__:
        method = RECURRENT.get(base.__name__)
        if method is None or not base.__module__.startswith("megatron.core.ssm."):
            continue
        # Another method, of a subclass or of the instance, may call other kernels.
        own = getattr(type(module), method) is vars(base)[method] and method not in vars(module)
        return Mixer(base.__name__, module) if own else None
    return None


def mixers(model: Any) -> list[Mixer]:
    """Of all layers of a language model; layers that are not known count as nothing."""
    return [mixer_of(layer) or Mixer("") for layer in model.decoder.layers]


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
    """Whether a language model heeds `recompute_granularity` "full": Mamba's decoder does so
    since 0.18."""
    for base in type(model.decoder).__mro__:
        # Since 0.18 a function of megatron.core.recompute, before a method.
        called = getattr(vars(base).get("forward"), "__globals__", {})
        if "checkpointed_forward" in called or "_checkpointed_forward" in vars(base):
            return True
    return False
