"""Which Megatron versions and models the schedule runs: looks for what refusals/table.py names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import megatron.core
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from packaging.version import Version

from megatron_prefix.errors import Reason, refused
from megatron_prefix.layers import table
from megatron_prefix.layers.kind import Part
from megatron_prefix.megatron import modules
from megatron_prefix.refusals.table import (
    DDP_DELAYED_WGRAD,
    DELAYED_WGRAD,
    FULLY_SHARDED,
    MROPE,
    OFFLOAD_OVERLAP,
    OLD_MEGATRON,
    OPTIONS,
    OVERLAPPED_EXPERTS,
    PARTIAL_CHECKPOINTS,
)

logger = logging.getLogger(__name__)
OTHER_STEPS = (PARTIAL_CHECKPOINTS, OVERLAPPED_EXPERTS, DELAYED_WGRAD)
"""Options with which Megatron's schedule gives forward steps more than an iterator and a model."""
OLDEST = Version("0.16.1")
NEWEST_TRIED = Version("0.19.2")


def check_version(version: str | None = None) -> None:
    """Refuses a Megatron-Core that is too old; warns of one that was not tried.

    Raises:
        CannotShare: older than 0.16.1.
    """
    found = Version(version or megatron.core.__version__)
    if Version(found.base_version) < OLDEST:
        raise refused(OLD_MEGATRON, found, OLDEST)
    if found > NEWEST_TRIED:
        logger.warning("megatron-core %s is newer than %s, the newest tried", found, NEWEST_TRIED)


def refusals(config: Any) -> list[Reason]:
    """What is refused of the options of a TransformerConfig."""
    return [one.given() for one in OPTIONS if one.is_on is not None and one.is_on(config)]


def other_steps(config: Any) -> Reason | None:
    """Why forward steps get more than an iterator and a model; None if they do not."""
    return next((one for one in refusals(config) if one.refusal in OTHER_STEPS), None)


def _configs(model: Any) -> Iterator[Any]:
    """The model's TransformerConfig, and those that its modules have of their own."""
    yield model.config
    seen = {id(model.config)}
    for module in model.decoder.modules():
        config = getattr(module, "config", None)
        if isinstance(config, TransformerConfig) and id(config) not in seen:
            seen.add(id(config))
            yield config


def _wrapper_refusals(model: Any) -> Iterator[Reason]:
    """What is refused of the wrappers of a model chunk."""
    while hasattr(model, "module"):
        ddp = getattr(model, "ddp_config", None)
        kind = type(model).__name__
        if "FullySharded" in kind or "FSDP" in kind or getattr(ddp, "use_megatron_fsdp", False):
            yield FULLY_SHARDED.given(kind)
        if getattr(ddp, "delay_wgrad_compute", False):
            yield DDP_DELAYED_WGRAD.given()
        model = model.module


def offload_refusal(model: Any) -> Reason | None:
    """Why a model chunk cannot run with memory policy "offload"; None if it can.

    Fused weight gradients set a flag on the weight, which Megatron's overlapped reduction reads;
    but a weight that comes back through autograd's saved-tensor hooks is another object.
    """
    ddp = getattr(model, "ddp_config", None)
    fused = getattr(get_model_config(model), "gradient_accumulation_fusion", False)
    if fused and ddp is not None and ddp.overlap_grad_reduce:
        return OFFLOAD_OVERLAP.given()
    return None


def check(model: Any, wrapped: Any = None) -> None:
    """Refuses a model that the schedule cannot run exactly.

    Args:
        model: the language model.
        wrapped: the same in its wrappers, if it has any.

    Raises:
        CannotShare: names the first feature in the way and the fix.
    """
    check_version()
    found = [reason for config in _configs(model) for reason in refusals(config)]
    found += _wrapper_refusals(wrapped)
    if getattr(model, "position_embedding_type", "rope") == "mrope":
        found.append(MROPE.given())
    found += modules.refusals(model)
    _refuse(found)


def check_options(config: Any, known: Iterable[Part]) -> None:
    """Refuses options that may have changed since `check`.

    Args:
        config: the language model's TransformerConfig.
        known: what leaves a payload in its layers.

    Raises:
        CannotShare: as of `check`.
    """
    _refuse([*refusals(config), *table.option_refusals(known, config)])


def _refuse(found: list[Reason]) -> None:
    if found:
        raise found[0].error("the prefix schedule cannot run this model with ")
