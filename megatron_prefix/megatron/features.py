"""Which Megatron versions and models the schedule runs: looks for what refusals/table.py names.

Options are read from the model's TransformerConfig, its modules are looked at whatever the options
say: segments compute rotary positions themselves, by the rule of Megatron's own modules, and layers
say by kind what is refused of them (layers/table.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import megatron.core
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version

from megatron_prefix import trainers
from megatron_prefix.device.modules import modules_of
from megatron_prefix.errors import CANNOT_RUN, Reason, refused
from megatron_prefix.layers import attention, table
from megatron_prefix.layers.kind import Part, owner
from megatron_prefix.megatron import families
from megatron_prefix.refusals.table import (
    DDP_DELAYED_WGRAD,
    DELAYED_WGRAD,
    DROPOUT,
    FULLY_SHARDED,
    GRADIENT_HOOKS,
    OLD_MEGATRON,
    OPTIONS,
    OTHER_FORWARD,
    OTHER_ROTARY,
    OTHER_SYMBOLS,
    OVERLAPPED_EXPERTS,
    PARTIAL_CHECKPOINTS,
    TORCH_DDP,
    UNMARKED_BIAS,
)
from megatron_prefix.trainers import versions

OTHER_STEPS = (PARTIAL_CHECKPOINTS, OVERLAPPED_EXPERTS, DELAYED_WGRAD)
"""Options with which Megatron's schedule gives forward steps more than an iterator and a model."""
OLDEST = Version("0.16.1")
OF_SLIME = Version("0.16.0rc0")
"""What the commit of Megatron-LM calls itself that slime brings, and others of its branch do."""


def check_version(version: str | None = None) -> None:
    """Refuses a Megatron-Core that is too old.

    Raises:
        CannotShare: older than 0.16.1, and not what slime brings.
    """
    release = Version(version or megatron.core.__version__)
    if Version(release.base_version) < OLDEST and Version(release.public) != OF_SLIME:
        raise refused(OLD_MEGATRON, release, OLDEST)


def refusals(config: Any) -> list[Reason]:
    """What is refused of the options of a TransformerConfig."""
    return [option.given() for option in OPTIONS if option.is_on and option.is_on(config)]


def other_steps(config: Any) -> Reason | None:
    """Why forward steps get more than an iterator and a model; None if they do not."""
    return next(
        (option.given() for option in OTHER_STEPS if option.is_on and option.is_on(config)), None
    )


def _configs(model: Any) -> Iterator[Any]:
    configs = (getattr(module, "config", None) for module in model.modules())
    own = [config for config in configs if isinstance(config, TransformerConfig)]
    yield from {id(config): config for config in (model.config, *own)}.values()


def _wrapper_refusals(model: Any) -> Iterator[Reason]:
    while hasattr(model, "module"):
        ddp = getattr(model, "ddp_config", None)
        kind = type(model).__name__
        if "FullySharded" in kind or "FSDP" in kind or getattr(ddp, "use_megatron_fsdp", False):
            yield FULLY_SHARDED.given(kind)
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            yield TORCH_DDP.given()
        if getattr(ddp, "delay_wgrad_compute", False):
            yield DDP_DELAYED_WGRAD.given()
        model = model.module


def _module_refusals(model: Any) -> Iterator[Reason]:
    own = families.forward_owner(model).startswith(("megatron.core.", "megatron_prefix."))
    if not own and families.family(model) is None:
        yield OTHER_FORWARD.given(type(model).__name__)
    yield from rotary_refusals(model)
    yield from head_refusals(model)
    yield from layer_refusals(model)
    for name, module in model.named_modules():
        if "Dropout" in type(module).__name__ and (getattr(module, "p", None) or 0) > 0:
            yield DROPOUT.given(module.p, name)


def rotary_refusals(model: Any) -> Iterator[Reason]:
    """What is refused of a language model's rotary embedding."""
    rotary = getattr(model, "rotary_pos_emb", None)
    if rotary is None:
        return
    if (kind := families.length_scaling(model)) is not None:
        yield OTHER_ROTARY.given(f"of rope_type {kind}, which depends on the length of the call")
    is_followed = {owner(rotary, name) for name in ("forward", "get_emb")} <= attention.ROTARY
    if not (is_followed or families.has_mrope(model)):
        yield OTHER_ROTARY.given(type(rotary).__name__)


def head_refusals(model: Any) -> Iterator[Reason]:
    """What is refused of what has taken the output layer's place, such as a critic's head (miles).

    Megatron adds up over tensor-parallel ranks the gradients of marked parameters only.
    """
    head = getattr(model, "output_layer", None)
    weight, bias = (getattr(head, name, None) for name in ("weight", "bias"))
    if bias is None or model.config.tensor_model_parallel_size == 1:
        return
    marked = [getattr(parameter, "sequence_parallel", False) for parameter in (weight, bias)]
    if marked == [True, False]:
        yield UNMARKED_BIAS.given(type(head).__name__)


def gradient_hooks(model: Any) -> Iterator[Reason]:
    """What is refused of hooks on gradients of parameters, in every step."""
    # Private: torch has no other way to ask.  Megatron's own hooks are on autograd's nodes.
    every = [parameter for module in modules_of(model) for parameter in module._parameters.values()]
    if any(parameter is not None and parameter._backward_hooks for parameter in every):
        hooked = (name for name, parameter in model.named_parameters() if parameter._backward_hooks)
        yield GRADIENT_HOOKS.given(next(hooked))


def layer_refusals(model: Any) -> Iterator[Reason]:
    """What is refused of the layers of a language model."""
    unknown = {*pattern_of(model)} - table.SYMBOLS - {"/"}
    if unknown:  # on any stage: else ranks that have none would wait for those that refuse
        yield OTHER_SYMBOLS.given(", ".join(sorted(unknown)))
    yield from table.refusals(model)
    yield from option_refusals(table.payload_parts(model), model.config)


def check(model: Any, wrapped: Any = None) -> None:
    """Refuses a model that the schedule cannot run exactly.

    Raises:
        CannotShare: names the first feature in the way and the fix.
    """
    check_version()
    versions.warn_untested(trainers.running_trainer())
    reasons = [reason for config in _configs(model) for reason in refusals(config)]
    reasons += _wrapper_refusals(wrapped)
    outermost = model if wrapped is None else wrapped
    reasons += gradient_hooks(outermost)
    reasons += _module_refusals(model)
    if reasons:
        raise reasons[0].error(CANNOT_RUN)


def check_again(model: Any, wrapped: Any, parts: Iterable[Part], facts: Any) -> None:
    """Refuses what may have changed since `check`: options, hooks on gradients, and what is
    frozen.

    Raises:
        CannotShare: as of `check`.
    """
    reasons = [*facts.refused, *option_refusals(parts, model.config), *gradient_hooks(wrapped)]
    if reasons:
        raise reasons[0].error(CANNOT_RUN)


def option_refusals(parts: Iterable[Part], config: Any) -> Iterator[Reason]:
    """What layers refuse of options that may have changed since `check`."""
    for kind, module in parts:
        if kind is not None:
            yield from kind.option_refusals(module, config)


def mask_use(parts: Iterable[Part]) -> attention.MaskUse:
    """What a model's attention does with the attention_mask of its calls."""
    cores = (part.module for part in parts if hasattr(part.module, "core_attention"))
    return max(map(attention.mask_use, cores), default=attention.MaskUse.IGNORED)


def pattern_of(model: Any) -> str:
    """Symbols of all layers of a hybrid language model, on every stage, and behind a slash those of
    what is behind its decoder, as often as it runs; "" for another."""
    own = getattr(model, "hybrid_layer_pattern", None)  # since 0.17
    pattern = own or getattr(model, "hybrid_override_pattern", None) or ""
    pattern = pattern.replace("|", "")
    attention = getattr(model, "hybrid_attention_ratio", None)
    if pattern or attention is None:
        return pattern
    # 0.16 has ratios as well, and its decoder keeps the layers of its own stage only.
    from megatron.core.ssm.mamba_hybrid_layer_allocation import allocate_layers

    mlp = getattr(model, "hybrid_mlp_ratio", 0.0)
    return "".join(allocate_layers(model.config.num_layers, attention, mlp))
