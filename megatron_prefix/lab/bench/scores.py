"""Bytes of attention's scores, where a kernel holds them: in 32 and 64 bit, and in Megatron's
layers without transformer-engine. What trainers run, 16 bit and fused kernels, has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_prefix.lab.predict.footprint import Footprint
from megatron_prefix.layers.blocks.math import MAX_SCORES
from megatron_prefix.tree.payload_map import Form

COPIES = 3
"""Tensors of scores that the exact kernel holds at once (layers/blocks/math.py)."""


def with_saved_scores(one: Footprint, config: Any, length: int) -> Footprint:
    """A footprint of the stock schedule, whose attention keeps its softmax and a mask.

    Args:
        one: as the memory model has it.
        config: the model's TransformerConfig.
        length: positions of every rollout.
    """
    size = config.params_dtype.itemsize
    if config.transformer_impl == "transformer_engine" and size == 2:
        return one
    row = length * (config.num_attention_heads * size + 1)
    if config.recompute_granularity == "full":
        return replace(one, again=one.again + row)
    layers = sum(payload.form == Form.POSITIONS for stage in one.payloads for payload in stage)
    row *= layers / config.num_layers
    return replace(one, inner=one.inner + row, wave=one.wave + row)


def held_by_math(config: Any, positions: int, keys: int) -> float:
    """What the exact kernel holds while a segment's attention to so many keys runs."""
    size = config.params_dtype.itemsize
    scores = min(MAX_SCORES, config.num_attention_heads * positions * keys)
    return float(COPIES * scores * max(4, size)) if size > 2 else 0.0
