"""A model by its config alone: which kinds its layers are, and what they compute and save.  Pure.

`config` is a Megatron TransformerConfig or anything with its fields: a ModelSpec of the lab, which
has `vocab_size` and `hybrid_override_pattern` besides.
"""

from __future__ import annotations

import itertools
from typing import Any

from megatron_prefix.layers import table
from megatron_prefix.layers.kind import Kind, Slot
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.footprint import Execution, Footprint


def layers_of(config: Any, pattern: str | None = None) -> list[tuple[Kind, ...]]:
    """What fills the slots of every layer of a whole model.

    Args:
        config: the model's.
        pattern: a symbol a layer of a hybrid model, whose layers have one slot; "" for a GPTModel
            (default: the spec's). What no kind has as its symbol counts as nothing.
    """
    if pattern is None:
        pattern = getattr(config, "hybrid_override_pattern", None) or ""
    if pattern:
        return [tuple(one for one in table.KINDS if one.symbol == symbol) for symbol in pattern]
    return [
        tuple(
            next(one for one in table.KINDS if one.slot is slot and one.fills(config, layer))
            for slot in Slot
        )
        for layer in range(config.num_layers)
    ]


def cost_of(config: Any, vocab_size: int | None = None, pattern: str | None = None) -> CostModel:
    """FLOPs of a model.

    Args:
        config: the model's.
        vocab_size: of the output layer (default: the spec's).
        pattern: see `layers_of`.
    """
    layers = layers_of(config, pattern)
    work = {kind: kind.work(config) for kind in {*itertools.chain(*layers)}}
    return CostModel.of_layers(
        [work[kind] for kind in itertools.chain(*layers)], config.hidden_size,
        _vocabulary(config, vocab_size),
    )  # fmt: skip


def footprint_of(
    config: Any,
    vocab_size: int | None = None,
    gathers: bool = False,
    host_layers: int = 0,
    pattern: str | None = None,
    recomputes: bool = True,
    execution: Execution | None = None,
) -> Footprint:
    """Bytes a position of a model on one rank.

    Args:
        config: the model's.
        vocab_size: of the whole output layer (default: the spec's).
        gathers, host_layers: see `Footprint.of_layers`.
        pattern: see `layers_of`.
        recomputes: see `Execution.of_config`.
        execution: how it is computed, which no spec says (default: as the config says).
    """
    form, layers = execution or Execution.of_config(config, recomputes), layers_of(config, pattern)
    memory = {kind: kind.memory(config, form) for kind in {*itertools.chain(*layers)}}
    return Footprint.of_layers(
        [[memory[kind] for kind in layer] for layer in layers], config.hidden_size,
        _vocabulary(config, vocab_size), form, gathers, host_layers,
    )  # fmt: skip


def _vocabulary(config: Any, given: int | None) -> int:
    return getattr(config, "vocab_size", None) or 0 if given is None else given
