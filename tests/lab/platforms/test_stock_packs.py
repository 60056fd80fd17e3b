"""transformer-engine's attention of packs is tried; here in name only."""

import sys
from types import SimpleNamespace

from megatron_prefix.lab.platforms import stock_packs


def library(break_it):
    class DotProductAttention:
        def __init__(self, heads, width, num_gqa_groups):
            assert (heads, width, num_gqa_groups) == (4, 8, 2)

        def __call__(self, query, key, value, **given):
            assert given["qkv_format"] == "thd" and given["attn_mask_type"] == "padding_causal"
            ends = given["cu_seqlens_q"].tolist()
            assert ends == given["cu_seqlens_kv"].tolist() == [0, 1000, 1300, 1377, 2556]
            return stock_packs._definition(query, break_it(key), value)

    return SimpleNamespace(DotProductAttention=DotProductAttention)


def tried(monkeypatch, break_it):
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", library(break_it))
    stock_packs.refusal.cache_clear()
    return stock_packs.refusal(4, 2, 8, "cpu")


def test_what_is_right_is_not_refused(monkeypatch):
    assert tried(monkeypatch, lambda key: key) is None


def test_a_wrong_gradient_is_named_although_the_output_is_right(monkeypatch):
    def sent(factor):
        def scaled(key):
            out = key.clone()
            out.register_hook(lambda gradient: gradient * factor)
            return out

        return scaled

    assert "wrong gradient of keys (relative error 2.4e-01)" in str(tried(monkeypatch, sent(0.76)))
    assert "NaN or infinite" in str(tried(monkeypatch, sent(float("nan"))))


def test_what_fails_says_so(monkeypatch):
    def fail(_):
        raise RuntimeError("no backend\nand more")

    assert tried(monkeypatch, fail) == "RuntimeError: no backend"


def test_without_the_library_nothing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    stock_packs.refusal.cache_clear()
    assert stock_packs.refusal(4, 2, 8, "cpu") is None
