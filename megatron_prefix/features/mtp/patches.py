"""Trainers' methods in the place of Megatron's, which follow the same rule.  Pure.

verl puts functions of one module into the instances (`patch_engine_mtp`). Its models return logits
with and without labels, and predict further where calls have labels. With `detach_encoder` no
gradient goes into embeddings and the decoder; before Megatron 0.17 none goes into the output layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_VERL = "verl.models.mcore.mtp_patch"
_FACTOR = "_verl_mtp_loss_normalization_factor"
"""Of a packing: by which verl multiplies the loss of a microbatch, if losses are per token."""


def is_verls(method: Any) -> bool:
    """Whether verl has put a method into an instance."""
    return getattr(getattr(method, "__func__", None), "__module__", "") == _VERL


def scales_microbatches(packings: Iterable[Any], config: Any) -> bool:
    """Whether verl scales losses of single microbatches."""
    factors = (getattr(packing, _FACTOR, None) for packing in packings)
    return bool(config.calculate_per_token_loss) and any(
        factor not in (None, 1) for factor in factors
    )
