"""What the layers of a model mix positions with: attention, a recurrence, or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import megatron.core
from packaging.version import Version

from megatron_prefix.plan.recurrent_spec import KINDS

RECURRENT = {"GatedDeltaNet": "forward", "MambaMixer": "_ssm_training"}
"""Megatron's recurrent modules (megatron/core/ssm), and the method whose kernels are replaced."""
_DETERMINISTIC, _OTHER_PATH = "deterministic_mode with recurrent layers", "use_mamba_mem_eff_path"
_OLD_CP, _SYMBOLS = "GatedDeltaNet with context parallelism", "other hybrid layers"
_OTHERS = "recurrent layers of another class"
REFUSED = {
    _DETERMINISTIC: "turn it off: its recurrences take no states",
    _OTHER_PATH: "turn it on: the other path takes no initial states",
    _OLD_CP: "install megatron-core 0.18 or newer",
    _SYMBOLS: f"use {' '.join(KINDS)}",
    _OTHERS: f"use Megatron's own attention, {' or '.join(RECURRENT)}, or the stock schedule",
}
"""What `refusals` tells of, and what to do."""


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


def refusals(model: Any) -> list[str]:
    """One line for every layer of a language model that the schedule cannot run."""
    config, found = model.config, []
    release = Version(Version(megatron.core.__version__).base_version)
    old_cp = config.context_parallel_size > 1 and release < Version("0.18")
    unknown = {*pattern_of(model)} - {*KINDS}
    if unknown:  # on any stage: else ranks that have none would wait for those that refuse
        found.append(f"hybrid layers {', '.join(sorted(unknown))}: {REFUSED[_SYMBOLS]}")
    for number, layer in enumerate(model.decoder.layers):
        mixer = mixer_of(layer)
        if mixer is None:
            module = getattr(layer, "mixer", None) or getattr(layer, "self_attention", layer)
            found.append(f"layer {number}'s {type(module).__name__}: {REFUSED[_OTHERS]}")
        elif mixer.kind == "GatedDeltaNet" and old_cp:
            found.append(f"{_OLD_CP}: {REFUSED[_OLD_CP]}")
    found += option_refusals(mixers(model), config)
    if why := _wrong_rule(model):
        found.append(f"GatedDeltaNet's kernel: {why}")
    return found


def option_refusals(found: Iterable[Mixer], config: Any) -> Iterator[str]:
    """One line for every recurrent layer with an option that the schedule cannot run with; Megatron
    reads these in every forward."""
    for kind, module in found:
        if kind in RECURRENT and getattr(config, "deterministic_mode", False):
            yield f"{_DETERMINISTIC}: {REFUSED[_DETERMINISTIC]}"
        if kind == "MambaMixer" and not module.use_mem_eff_path:
            yield f"{_OTHER_PATH} off: {REFUSED[_OTHER_PATH]}"


def _wrong_rule(model: Any) -> str | None:
    """Why the gated delta rule cannot be used on the model's GPU; tried once a process."""
    kinds = {mixer.kind for mixer in map(mixer_of, model.decoder.layers) if mixer is not None}
    if "GatedDeltaNet" not in kinds or next(model.parameters()).device.type != "cuda":
        return None
    from megatron_prefix.layers.recurrent import probe  # it loads the CPU's kernels to compare with

    config = model.config
    ranks = config.tensor_model_parallel_size * config.context_parallel_size
    return probe.refusals(
        "cuda",
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_num_value_heads // ranks,
    )["GatedDeltaNet"]


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
