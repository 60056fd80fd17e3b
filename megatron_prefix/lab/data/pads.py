"""Pads of a row of token ids: what its attention mask leaves out is no part of the rollout."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_prefix.lab.data import jsonl
from megatron_prefix.lab.data.jsonl import Fault, Row

FIELDS = ("attention_mask", "prompt_mask")
"""Of all tokens, and of the prompt's where it is a list of its own."""


def attended(row: Row, num_tokens: int, num_prompt: int | None) -> NDArray[np.bool_]:
    """Which tokens are no pads, bool [num_tokens]: one run of them, all if the row has no mask.

    Args:
        row: of the file.
        num_tokens: of the row, pads included.
        num_prompt: of the list of the prompt's ids; None if the row has no such list.
    """
    result = np.ones(num_tokens, dtype=bool)
    for field, length in zip(FIELDS, (num_tokens, num_prompt), strict=True):
        if length is None or row.get(field) is None:
            continue
        flags = jsonl.flags(row, field)
        if len(flags) != length:
            text = f"not one entry for each of {length} tokens ({len(flags)}); give one a token"
            raise Fault(field, text)
        result[:length] &= flags
        _check_run(field, result)
    return result


def _check_run(field: str, mask: NDArray[np.bool_]) -> None:
    places = np.flatnonzero(mask)
    if not len(places):
        raise Fault(
            field,
            f"is 0 for all {len(mask)} tokens of the row; give 1 for tokens that are no padding",
        )
    if len(places) <= places[-1] - places[0]:
        hole = int(places[0] + np.flatnonzero(~mask[places[0] :])[0])
        text = f"is 0 inside the rollout (token {hole}): only its ends can be padding"
        raise Fault(field, f"{text}; remove the padding from the row")
