"""What is refused of a model's modules, whatever its options say.

Segments compute rotary positions themselves, by the rule of Megatron's own modules; layers say by
kind what is refused of them (layers/table.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_prefix.errors import Reason
from megatron_prefix.layers import attention, table
from megatron_prefix.layers.kind import owner
from megatron_prefix.megatron.decoder import pattern_of
from megatron_prefix.refusals.table import DROPOUT, OTHER_ROTARY, OTHER_SYMBOLS

ROTARY = {
    "megatron.core.models.common.embeddings.rotary_pos_embedding.RotaryEmbedding",
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding.YarnRotaryEmbedding",
}


def refusals(model: Any) -> Iterator[Reason]:
    """What is refused of the modules of a language model."""
    rotary = getattr(model, "rotary_pos_emb", None)
    if (
        rotary is not None
        and not {owner(rotary, name) for name in ("forward", "get_emb")} <= ROTARY
    ):
        yield OTHER_ROTARY.given(type(rotary).__name__)
    yield from _layer_refusals(model)
    for name, module in model.named_modules():
        if "Dropout" in type(module).__name__ and (getattr(module, "p", None) or 0) > 0:
            yield DROPOUT.given(module.p, name)


def _layer_refusals(model: Any) -> Iterator[Reason]:
    """What is refused of the layers."""
    unknown = {*pattern_of(model)} - table.SYMBOLS
    if unknown:  # on any stage: else ranks that have none would wait for those that refuse
        yield OTHER_SYMBOLS.given(", ".join(sorted(unknown)))
    yield from table.refusals(model)
    yield from table.option_refusals(table.payload_parts(model), model.config)


def needs_masks(model: Any) -> bool:
    """Whether attention of a language model is causal only if its calls have a causal mask."""
    parts = table.payload_parts(model)
    return any(attention.needs_masks(one.module) for one in parts if _has_core(one.module))


def _has_core(module: Any) -> bool:
    return hasattr(module, "core_attention")
