"""What linear layers in FP8 (layers/precision.py) keep of their inputs.  Pure.

For the gradient of its weights a linear layer keeps a copy of its input in blocks of columns, one
byte a number and its scales, and drops the one in blocks of rows that it has multiplied (`_Linear`
and `_LayerNormLinear` in transformer_engine/pytorch/module, `_GroupedLinear` of experts; 2.11): the
16-bit input is kept by others only. Attention's output projection keeps its input as it is, as
attention has kept it anyway (`set_save_original_input` in megatron/core/transformer/attention.py,
since transformer-engine 2.6).
"""

from __future__ import annotations

from typing import Any

from megatron_prefix.lab.predict.execution import Execution
from megatron_prefix.layers.precision import is_fp8

_SCALES = {"blockwise": 4 / 128, "mxfp8": 1 / 32}
"""Bytes of scales for a number of a copy in blocks of columns: for 128 rows 4 bytes, for 32 one
(`get_scale_shape` and `make_empty` in transformer_engine/pytorch/tensor/float8_blockwise_tensor.py
and transformer_engine/pytorch/tensor/mxfp8_tensor.py)."""


def kept_bytes(config: Any, itemsize: int) -> float:
    """Bytes of a number of its input that a linear layer keeps for the gradient of its weights.

    Args:
        config: the model's.
        itemsize: of a number outside of such layers.
    """
    recipe = getattr(config, "fp8_recipe", None) or ""  # a str, or Megatron's Fp8Recipe, a str, too
    return 1 + _SCALES[recipe] if is_fp8(config) and recipe in _SCALES else itemsize


def less(numbers: float, config: Any, form: Execution) -> float:
    """Bytes by which products keep less of so many numbers of their inputs than these take."""
    return numbers * (form.itemsize - kept_bytes(config, form.itemsize))


def projected_bytes(config: Any, form: Execution) -> float:
    """Bytes a position that a product with a norm in front of it keeps of what that gives."""
    numbers = config.hidden_size / form.sequence_ranks
    return numbers * form.itemsize - less(numbers, config, form)
