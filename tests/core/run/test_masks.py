"""Which masks of model calls are taken, for each thing that attention does with one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_prefix.errors import CannotShare
from megatron_prefix.layers.attention import MaskUse
from megatron_prefix.layers.model import counts_tokens
from megatron_prefix.run.calls import ModelCall, check_masks

CAUSAL = torch.ones(1, 1, 4, 4, dtype=torch.bool).triu(1)
RESET = CAUSAL.clone()
RESET[..., 2:, :2] = True
FUTURE = CAUSAL.clone()
FUTURE[..., 1, 2] = False
TAIL = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
HEAD = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
HOLE = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
NONE_LEFT = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
IGNORED, OBEYED, NEEDED = MaskUse


def padding(kept: torch.Tensor) -> torch.Tensor:
    """Transformer-engine's mask of padding, [samples, 1, 1, positions], as SkyRL gives it."""
    return (kept == 0)[:, None, None]


NOT_CAUSAL, PADS = "attention_mask of a model call is not causal", "padding_mask leaves tokens out"


def accepts(use: MaskUse, *, counted: bool = False, **masks: Any) -> str:
    """ "" or why a step is refused whose last call has these masks."""
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    plain = {"input_ids": tokens, "attention_mask": CAUSAL}
    try:
        check_masks(
            [ModelCall(0, plain), ModelCall(1, {**plain, **masks})], use, counts_tokens=counted
        )
    except CannotShare as error:
        return str(error)
    return ""


@pytest.mark.parametrize("use", MaskUse)
def test_the_causal_mask_is_taken_in_any_case(use: MaskUse) -> None:
    assert not accepts(use)
    assert not accepts(use, attention_mask=CAUSAL[0, 0])


@pytest.mark.parametrize("use", MaskUse)
@pytest.mark.parametrize(
    "mask",
    [
        RESET, FUTURE, CAUSAL.float(), CAUSAL[..., :1, :], torch.zeros(4), HEAD, HOLE, NONE_LEFT,
        padding(HEAD), padding(HOLE), padding(NONE_LEFT), padding(TAIL).long(), ~padding(TAIL),
    ],
    ids=[
        "reset", "future", "float", "one row", "vector", "head", "hole", "none left", "padded head",
        "padded hole", "none but padding", "padding as a number", "padding upside down",
    ],
)  # fmt: skip
def test_masks_that_are_not_causal_are_refused(use: MaskUse, mask: torch.Tensor) -> None:
    assert NOT_CAUSAL in accepts(use, attention_mask=mask)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_mask_that_cuts_off_the_end_is_taken_if_ignored(dtype: torch.dtype) -> None:
    assert not accepts(IGNORED, attention_mask=TAIL.to(dtype))
    assert not accepts(IGNORED, attention_mask=torch.ones(2, 4, dtype=dtype))
    assert not accepts(IGNORED, attention_mask=padding(TAIL))
    # Of another shape than the tokens', and where attention would obey it.
    assert NOT_CAUSAL in accepts(IGNORED, attention_mask=TAIL[:, :3].to(dtype))
    for use in (OBEYED, NEEDED):
        for mask in (TAIL.to(dtype), padding(TAIL)):
            assert NOT_CAUSAL in accepts(use, attention_mask=mask)


def test_layers_that_need_a_mask_get_one() -> None:
    assert "attn_mask_type is arbitrary" in accepts(NEEDED, attention_mask=None)
    for use in (IGNORED, OBEYED):
        assert not accepts(use, attention_mask=None)


def test_a_padding_mask_matters_where_routers_count() -> None:
    pads, none = TAIL == 0, torch.zeros(2, 4, dtype=torch.bool)
    assert not accepts(OBEYED, padding_mask=pads)
    assert not accepts(OBEYED, padding_mask=none, counted=True)
    assert PADS in accepts(OBEYED, padding_mask=pads, counted=True)


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({}, False),
        ({"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.01}, False),
        ({"moe_aux_loss_coeff": 0.0}, False),
        ({"moe_aux_loss_coeff": 0.01}, True),
        ({"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
          "moe_aux_loss_coeff": [0.0, 0.01]}, True),
        ({"moe_z_loss_coeff": 1e-3}, True),
        ({"moe_router_enable_expert_bias": True}, True),
    ],
)  # fmt: skip
def test_what_of_routers_counts_tokens(fields: dict[str, Any], counts: bool) -> None:
    options = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0, **fields}
    assert counts_tokens(SimpleNamespace(num_moe_experts=4, **options)) == counts
    assert not counts_tokens(SimpleNamespace(num_moe_experts=None, **options))


@pytest.mark.parametrize("hidden", [False, True], ids=["sees the future", "hides the past"])
@pytest.mark.parametrize(("query", "key"), [(1, 2), (0, 3)])
def test_masks_that_hide_one_key_too_few_or_too_many_are_refused(
    hidden: bool, query: int, key: int
) -> None:
    """One entry of the second of two samples."""
    mask = CAUSAL.repeat(2, 1, 1, 1)
    assert not accepts(OBEYED, attention_mask=mask)
    if hidden:
        query, key = key, query
    mask[1, 0, query, key] = hidden
    assert NOT_CAUSAL in accepts(OBEYED, attention_mask=mask)
