"""How `fa4` calls flash-attn-4, on a stand-in with the package's layouts; and when it is chosen."""

from __future__ import annotations

import logging
import os
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_prefix.errors import UserError
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.lab.numerics.working_kernels import why
from megatron_prefix.layers.blocks import kernels, operators
from megatron_prefix.layers.blocks.batched import batches
from megatron_prefix.layers.blocks.interface import Runs
from megatron_prefix.layers.blocks.kernels import KERNELS, choose_kernel
from tests.harness.attention_cases import CASES, LAYOUTS, NARROW, Case, check, make, on_cuda

MATH, FA4 = KERNELS["math"], KERNELS["fa4"]
REAL_FA4 = operators.flash_attn_4
LONG = {
    "one long run": Case((300,), (270,), heads=2, kv_heads=1),
    "a long run below a short one": Case((40,), (270,), heads=2, kv_heads=1),
    "long runs": Case((300,), (270, 280), heads=2, kv_heads=1),
    "equal long runs": Case((300,), (270, 270, 270), heads=2, kv_heads=1),
}


class StandIn:
    """The two functions of flash_attn.cute.interface, with its argument names and layouts."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def runs(self, q: Tensor, k: Tensor, call: dict[str, Any]) -> Runs:
        self.calls.append({**call, "q": q, "k": k})
        if q.ndim == 4:
            assert q.shape[0] == k.shape[0] and not call["cu_seqlens_q"]
            num = q.shape[0]
            return Runs((q.shape[1],) * num, (k.shape[1],) * num, call["causal"])
        starts = (call["cu_seqlens_q"], call["cu_seqlens_k"])
        assert all(x.dtype == torch.int32 and x.is_contiguous() for x in starts)
        queries, keys = (tuple(x.diff().tolist()) for x in starts)
        assert max(queries) <= call["max_seqlen_q"] and max(keys) <= call["max_seqlen_k"]
        assert starts[0][-1] == q.shape[0] and starts[1][-1] == k.shape[0]
        return Runs(queries, keys, call["causal"])

    def _flash_attn_fwd(
        self, q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        softmax_scale=None, causal=False, return_lse=False,
    ):  # fmt: skip
        assert return_lse and isinstance(softmax_scale, float)
        runs = self.runs(q, k, {**locals()})
        rows = [x.flatten(0, 1) if q.ndim == 4 else x for x in (q, k, v)]
        out, lse, _ = MATH.forward(*rows, runs, softmax_scale)
        if q.ndim == 4:
            num = len(q)
            out = out.unflatten(0, (num, -1))
            lse = lse.unflatten(1, (num, -1)).transpose(0, 1).contiguous()
        return out, lse, None, None, None

    def _flash_attn_bwd(
        self, q, k, v, out, dout, lse, softmax_scale=None, causal=False, cu_seqlens_q=None,
        cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    ):  # fmt: skip
        runs = self.runs(q, k, {**locals()})
        dense = q.ndim == 4
        heads = q.shape[-2]
        assert out.shape == dout.shape == (*q.shape[:-1], v.shape[-1])
        assert lse.shape == ((len(q), heads, q.shape[1]) if dense else (heads, q.shape[0]))
        assert lse.dtype == torch.float32 and lse.is_contiguous()
        rows = [x.flatten(0, 1) if dense else x for x in (dout, q, k, v, out)]
        aux = ((),) * len(batches(runs, len(rows[1]), len(rows[2])))
        lse = lse.transpose(0, 1).flatten(1) if dense else lse
        gradients = MATH.backward(*rows, lse, aux, runs, softmax_scale)
        return tuple(x.unflatten(0, (len(q), -1)) if dense else x for x in gradients)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    monkeypatch.setattr(operators, "flash_attn_4", lambda: found)
    return found


@pytest.mark.parametrize("case", [*CASES.values(), *LONG.values()], ids=[*CASES, *LONG])
def test_blocks_match_full_attention(case: Case, library: StandIn) -> None:
    check(FA4, case, torch.bfloat16)
    assert library.calls


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: str, library: StandIn) -> None:
    check(FA4, CASES["uneven rollouts"], torch.bfloat16, layout)
    check(FA4, LONG["one long run"], torch.float16, layout)


def test_values_of_another_width(library: StandIn) -> None:
    check(FA4, replace(NARROW, kv_heads=4), torch.bfloat16, "buffer")
    check(FA4, replace(LONG["one long run"], dim_v=8), torch.bfloat16, "buffer")


def test_short_runs_compile_nothing_of_their_own(library: StandIn) -> None:
    """Dense calls are long, and the bounds of others say nothing of short runs."""
    for case in (*CASES.values(), *LONG.values()):
        check(FA4, case, torch.bfloat16)
    dense = [call for call in library.calls if call["q"].ndim == 4]
    varlen = [call for call in library.calls if call["q"].ndim == 3]
    for calls in (dense, varlen):
        assert {call["causal"] for call in calls} == {True, False}
    assert min(min(call["q"].shape[1], call["k"].shape[1]) for call in dense) > 256
    assert {call["q"].shape[0] for call in dense} == {1, 3}
    assert min(min(call["max_seqlen_q"], call["max_seqlen_k"]) for call in varlen) > 256


@pytest.mark.parametrize("num", [256, 257, 600])
def test_more_runs_are_several_calls(num: int, library: StandIn) -> None:
    """flash-attn-4 compiles for calls of more than 256 runs."""
    lengths = tuple(1 + n % 3 for n in range(num))
    wave = Case((), lengths, heads=2, kv_heads=1)
    check(FA4, wave, torch.bfloat16)
    tensors, below = make(wave, torch.bfloat16), Runs(lengths, lengths[::-1])
    call = (tensors.q, tensors.keys[0], tensors.values[0])
    for got, wanted in zip(
        FA4.forward(*call, below, 0.25)[:2], MATH.forward(*call, below, 0.25)[:2], strict=True
    ):
        assert_close(got, wanted, sum(lengths), torch.bfloat16)
    sizes = [len(call["cu_seqlens_q"]) - 1 for call in library.calls]
    assert max(sizes) <= 256 and max(sizes) - min(sizes) <= 1
    each = -(-num // 256)  # forward and backward of the first, forward of the second
    assert len(sizes) == 3 * each


def test_a_slice_of_a_cache_is_not_copied(library: StandIn) -> None:
    arena = torch.randn(1000, 2, 2, 16, dtype=torch.bfloat16)  # K beside V
    q = torch.randn(300, 4, 16, dtype=torch.bfloat16)
    for runs in (Runs.dense(300, 290), Runs((100, 200), (90, 200))):
        k, v = (x.squeeze(1)[40:330] for x in arena.split(1, dim=1))
        FA4.forward(q, k, v, runs, 0.25)
        assert library.calls[-1]["k"].data_ptr() == k.data_ptr()
        assert library.calls[-1]["q"].data_ptr() == q.data_ptr()


def test_what_compiles_is_said_once(library: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for name in ("equal rollouts", "one K/V head", "equal rollouts", "one K/V head"):
            check(FA4, replace(CASES[name], dim=88, dim_v=88), torch.bfloat16)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "2 query heads" in told[0] and "6 query heads" in told[1]


def test_what_it_compiles_is_kept_on_disk(
    library: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless the user says no; and the line says where."""
    name = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
    found = types.SimpleNamespace(CUTE_DSL_CACHE_ENABLED=True, get_cache_path=lambda: "a/folder")
    imported: list[str | None] = []

    def module(_: str) -> Any:
        imported.append(os.environ.get(name))
        return found

    monkeypatch.setattr(operators.importlib, "import_module", module)
    for before, wanted in ((None, "1"), ("0", "0")):
        monkeypatch.setenv(name, before or "")
        if before is None:
            monkeypatch.delenv(name)
        REAL_FA4.__wrapped__()
        assert imported.pop() == wanted
    for enabled, width, words in (
        (True, 104, "results are kept in a/folder"), (False, 120, "once a process"),
    ):  # fmt: skip
        found.CUTE_DSL_CACHE_ENABLED = enabled
        with caplog.at_level(logging.WARNING):
            check(FA4, Case((), (3,), dim=width, dim_v=width), torch.bfloat16)
        assert words in caplog.records[-1].getMessage()


# Where it runs ------------------------------------------------------------------------------------


def refusal(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], width: int, width_v: int,
    group: int = 2,
) -> str | None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    shapes = (2 * group, width), (2, width), (2, width_v)
    return FA4.refusal(*(on_cuda(torch.empty(4, *one, dtype=torch.bfloat16)) for one in shapes))


@pytest.mark.parametrize(
    ("capability", "widths", "group", "reason"),
    [
        ((9, 0), (128, 128), 4, None),
        ((9, 0), (192, 128), 1, None),
        ((9, 0), (192, 128), 2, "as wide as queries"),
        ((9, 0), (256, 256), 4, None),
        ((10, 0), (192, 128), 4, None),
        ((10, 3), (256, 256), 4, None),
        ((10, 0), (192, 192), 4, "up to 128"),
        ((8, 0), (128, 128), 4, "got 8.0"),
        ((12, 0), (128, 128), 4, "got 12.0"),
    ],
)
def test_devices_and_widths(
    capability: tuple[int, int], widths: tuple[int, int], group: int, reason: str | None,
    library: StandIn, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    found = refusal(monkeypatch, capability, *widths, group)
    assert (found is None) if reason is None else (found is not None and reason in found)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}\nand more")

    monkeypatch.setattr(operators.importlib, "import_module", missing)
    monkeypatch.setattr(operators, "flash_attn_4", REAL_FA4.__wrapped__)
    found = refusal(monkeypatch, (9, 0), 128, 128) or ""
    assert "pip install flash-attn-4==" in found and "flash_attn.cute" in found
    assert "\n" not in found


Reasons = dict[str, str | None]


@pytest.fixture
def reasons(monkeypatch: pytest.MonkeyPatch) -> tuple[Reasons, list[str]]:
    """What probing finds, and for which kernels it was asked."""
    found: Reasons = dict.fromkeys(KERNELS)
    asked: list[str] = []

    def probed(name: str, *heads: object) -> str | None:
        asked.append(name)
        return found[name]

    monkeypatch.setattr(kernels, "probed", probed)
    return found, asked


def test_auto_prefers_it_where_it_works(reasons: tuple[Reasons, list[str]]) -> None:
    found, asked = reasons

    def auto() -> str:
        return choose_kernel("auto", "cuda:0", torch.bfloat16, 128).name

    assert auto() == "fa4" and asked == ["fa4"]
    found["fa4"] = "runs on Hopper and Blackwell"
    assert auto() == "cudnn or flash by shape"
    found["flash"] = "broken"
    assert auto() == "cudnn"
    found["cudnn"], found["flash"] = "broken", None
    assert auto() == "flash"
    assert choose_kernel("auto", "cuda:0", torch.float64, 128).name == "math"


def test_auto_says_why(reasons: tuple[Reasons, list[str]]) -> None:
    found, _ = reasons

    def told(dtype: torch.dtype = torch.bfloat16) -> str:
        return why("cuda:0", dtype, 128, group=4)

    assert told() == "fa4, the fastest here"
    assert told(torch.float64) == "math, which is exact"
    found["fa4"] = "needs flash-attn-4: pip install flash-attn-4=="
    missing = "fa4 needs flash-attn-4: pip install flash-attn-4=="
    assert told() == f"cudnn or flash by shape: {missing}"
    found["cudnn"] = "broken"
    assert told() == f"flash: {missing}; cudnn broken"
    found |= dict.fromkeys(("fa4", "cudnn", "flash"), "takes bfloat16 and float16")
    assert told() == "math: fa4 takes bfloat16 and float16 (cudnn, flash likewise)"


def test_only_kernels_that_could_be_chosen_are_tried(reasons: tuple[Reasons, list[str]]) -> None:
    found, asked = reasons
    choose_kernel("cudnn+flash", "cuda:0", torch.bfloat16, 128)
    assert asked == ["cudnn", "flash"]
    found["fa4"] = "no"
    with pytest.raises(UserError, match="'fa4' does not work here: no; use math, flash_cpu, flash"):
        choose_kernel("fa4", "cuda:0", torch.bfloat16, 128)
