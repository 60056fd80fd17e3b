"""Trainers' methods in the place of Megatron's, which follow the same rule.  Pure.

verl puts functions of one module into the instances (`patch_engine_mtp`). Its models return logits
with and without labels, and predict further where calls have labels. With `detach_encoder` no
gradient goes into embeddings and the decoder; before Megatron 0.17 none goes into the output layer.

slime and miles change Megatron's files (slime's docker/patch/latest/megatron.patch, miles' fork):
the model predicts further where calls have a keyword with tokens. Labels are made of these, and
labels and weights move by one before the first layer; no gradient leaves the layers.

Megatron-Bridge's Qwen3-VL and Qwen3.5 have Megatron's methods, and hand them the padded ends of a
pack in the place of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_VERL = "verl.models.mcore.mtp_patch"
_PADDED_ENDS = "_get_mtp_packed_seq_params"
"""The function with which Megatron-Bridge does so."""
_FACTOR = "_verl_mtp_loss_normalization_factor"
"""Of a packing: by which verl multiplies the loss of a microbatch, if losses are per token."""
KEYWORD, TOKENS = "mtp_kwargs", "mtp_labels"
"""slime's and miles' keyword of the model, a dict, and what is in it."""


def is_verls(method: Any) -> bool:
    """Whether verl has put a method into an instance."""
    return getattr(getattr(method, "__func__", None), "__module__", "") == _VERL


def further_tokens(call: Any) -> Any:
    """What the keyword of a model call has; None: nothing is predicted further."""
    given = call[KEYWORD]
    return given.get(TOKENS) if isinstance(given, Mapping) else None


def moves_by_padded_ends(model: Any) -> bool:
    """Whether a model's labels move by the padded ends of packs, whatever `cu_seqlens_q` has."""
    code = getattr(type(model).forward, "__code__", None)
    return _PADDED_ENDS in getattr(code, "co_names", ())


def scales_microbatches(packings: Iterable[Any], config: Any) -> bool:
    """Whether verl scales losses of single microbatches."""
    factors = (getattr(packing, _FACTOR, None) for packing in packings)
    return bool(config.calculate_per_token_loss) and any(
        factor not in (None, 1) for factor in factors
    )
