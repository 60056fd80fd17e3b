"""transformer-engine's attention of packs is tried; here in name only."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_prefix.lab.platforms import stock_packs


def library(break_it: Any) -> Any:
    class DotProductAttention:
        def __init__(self, heads: int, width: int, num_gqa_groups: int) -> None:
            assert (heads, width, num_gqa_groups) == (4, 8, 2)

        def __call__(self, query: Any, key: Any, value: Any, **given: Any) -> torch.Tensor:
            assert given["qkv_format"] == "thd" and given["attn_mask_type"] == "padding_causal"
            ends = given["cu_seqlens_q"].tolist()
            assert ends == given["cu_seqlens_kv"].tolist() == [0, 1000, 1300, 1377, 2556]
            return stock_packs._definition(query, break_it(key), value)

    return SimpleNamespace(DotProductAttention=DotProductAttention)


def tried(monkeypatch: pytest.MonkeyPatch, break_it: Any) -> str | None:
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", library(break_it))
    stock_packs.refusal.cache_clear()
    return stock_packs.refusal(4, 2, 8, "cpu")


def test_what_is_right_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(monkeypatch, lambda key: key) is None


def test_a_wrong_gradient_is_named_although_the_output_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sent(factor: float) -> Any:
        def scaled(key: torch.Tensor) -> torch.Tensor:
            out = key.clone()
            out.register_hook(lambda gradient: gradient * factor)
            return out

        return scaled

    assert "wrong gradient of keys (relative error 2.4e-01)" in str(tried(monkeypatch, sent(0.76)))
    assert "NaN or infinite" in str(tried(monkeypatch, sent(float("nan"))))


def test_what_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no backend\nand more")

    assert tried(monkeypatch, fail) == "RuntimeError: no backend"


def test_without_the_library_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    stock_packs.refusal.cache_clear()
    assert stock_packs.refusal(4, 2, 8, "cpu") is None
