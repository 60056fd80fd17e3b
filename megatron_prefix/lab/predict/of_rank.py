"""The footprint of a rank's model, by its configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_prefix.lab.predict.execution import Execution
from megatron_prefix.lab.predict.footprint import Footprint
from megatron_prefix.lab.predict.model import footprint_of
from megatron_prefix.layers import table
from megatron_prefix.layers.releases import is_since
from megatron_prefix.run.rank import Rank


def execution_of(rank: Rank) -> Execution:
    """How a rank's model is computed."""
    form = Execution.of_config(rank.config, recomputes(rank.language_models[0]))
    stages = rank.num_stages * len(rank.models)  # a trainer's config may say another number
    return replace(form, num_stages=stages, holds_projection=is_since("0.18"))


def footprint_of_rank(rank: Rank, *, gathers: bool = False) -> Footprint:
    """Bytes a position of the model on a rank.

    Args:
        gathers: whether it keeps K/V of all context-parallel ranks.
    """
    layers, model = table.with_module_fields(rank.config, rank.language_models), rank.model
    return footprint_of(layers, execution_of(rank), model.vocab_size, model.pattern, gathers)


def recomputes(model: Any) -> bool:
    """Whether a language model follows `recompute_granularity` "full": Mamba's decoder does so
    since 0.18."""
    for base in type(model.decoder).__mro__:
        # Since 0.18 a function of megatron.core.recompute, before a method.
        called = getattr(vars(base).get("forward"), "__globals__", {})
        if "checkpointed_forward" in called or "_checkpointed_forward" in vars(base):
            return True
    return False
