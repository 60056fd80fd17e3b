"""CUDA kernels and the fused merge against full attention with a mask in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_prefix.attention import merge as merging
from megatron_prefix.attention.interface import Kernel, Runs
from megatron_prefix.attention.kernels import KERNELS, available, choose
from megatron_prefix.attention.merge import merge
from megatron_prefix.errors import UserError
from megatron_prefix.numerics import assert_close
from tests.harness.attention_cases import CASES, LAYOUTS, Case, by_blocks, check, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = ("flash", "cudnn", "cudnn+flash", "flash+cudnn", "math")
ODD = {
    "around a tile": Case((300, 64), (63, 64, 65, 129, 2, 1), heads=8, kv_heads=2),
    "equal, odd": Case((257,), (33, 33, 33), heads=8, kv_heads=1),
    "rows beside a lone query": Case((130,), (1,), heads=8, kv_heads=2),
    "rows below a lone key": Case((1,), (40, 40), heads=8, kv_heads=8),
}


def working(name: str, dtype: torch.dtype, head_dim: int, head_dim_v: int) -> Kernel:
    """The kernel, or a skip that says why this machine cannot run it."""
    try:
        return choose(name, "cuda", dtype, head_dim, head_dim_v)
    except UserError as reason:
        pytest.skip(str(reason))


def test_a_fused_kernel_works_on_this_device() -> None:
    """At Llama's and Qwen's head width, on any device since Ampere; prints the reasons if not."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the fused kernels need compute capability 8.0")
    reasons = available("cuda", torch.bfloat16, 128)
    assert reasons["math"] is None and reasons["flash"] is None, reasons
    auto = choose("auto", "cuda", torch.bfloat16, 128).name
    assert auto in ("cudnn or flash by shape", "cudnn", "flash"), reasons
    assert choose("auto", "cuda", torch.float64, 128).name == "math"
    assert choose("auto", "cuda", torch.float32, 128).name == "math"


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(128, torch.bfloat16), (64, torch.float16)], ids=["bf16", "fp16"]
)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", [*CASES.values(), *ODD.values()], ids=[*CASES, *ODD])
def test_blocks_match_full_attention(
    case: Case, name: str, head_dim: int, dtype: torch.dtype
) -> None:
    kernel = working(name, dtype, head_dim, head_dim)
    check(kernel, replace(case, dim=head_dim, dim_v=head_dim), dtype, device="cuda")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_any_strides(name: str, layout: str) -> None:
    """One shape in every layout, in both orders: a plan kept for one must not serve another."""
    kernel = working(name, torch.bfloat16, 64, 64)
    for case in (CASES["equal rollouts"], CASES["uneven rollouts"]):
        for order in (layout, "contiguous", layout):
            check(kernel, replace(case, dim=64, dim_v=64), torch.bfloat16, order, "cuda")


@pytest.mark.parametrize("widths", [(192, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("name", ["cudnn", "math"])
def test_values_of_another_width(name: str, widths: tuple[int, int]) -> None:
    kernel = working(name, torch.bfloat16, *widths)
    for case in (CASES["uneven rollouts"], CASES["three ancestors"]):
        narrow = replace(case, heads=4, kv_heads=4, dim=widths[0], dim_v=widths[1])
        check(kernel, narrow, torch.bfloat16, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_math_in_full_precision(case: Case, dtype: torch.dtype) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        check(KERNELS["math"], case, dtype, device="cuda")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_no_step_of_a_wave_waits_for_the_device(name: str) -> None:
    """Forward, merge and backward of an uneven wave never seen before, without a host sync."""
    kernel = working(name, torch.bfloat16, 64, 64)
    lengths = (17, 5, 11) if name == "flash" else (11, 11, 11)
    case = Case((70, 33), lengths, dim=64, dim_v=64)
    warm = replace(case, lengths=(11, 17, 5) if name == "flash" else lengths)
    by_blocks(kernel, warm, make(warm, torch.bfloat16, device="cuda"))  # compiles, builds plans
    tensors = make(case, torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        by_blocks(kernel, case, tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_misaligned_tensor_is_refused() -> None:
    """The kernels would fault on it, and take the process's CUDA context with them."""
    x = torch.randn(9 * 4 * 64 + 8, device="cuda").to(torch.bfloat16)
    aligned, shifted = (x[start:][: 9 * 4 * 64].view(9, 4, 64) for start in (0, 4))
    for name in ("flash", "cudnn"):
        assert KERNELS[name].refusal(aligned, aligned, aligned) is None
        assert "16 bytes" in (KERNELS[name].refusal(aligned, shifted, aligned) or "")


def test_fp32_is_refused_by_the_fused_kernels() -> None:
    reasons = available("cuda", torch.float32, 64)
    assert "float32" in (reasons["flash"] or "") and "float32" in (reasons["cudnn"] or "")


@pytest.mark.parametrize("num", [2, 3, 5, 9])
def test_the_fused_merge_is_the_eager_one(num: int, caplog: pytest.LogCaptureFixture) -> None:
    """Rows without keys included, and with no warning of a fallback."""
    for rows in (64, 193, 1):
        case = Case((9,) * num, (rows,), dim=64, dim_v=64)
        tensors = make(case, torch.bfloat16, device="cuda")
        pairs = zip(tensors.keys[:num], tensors.values[:num], strict=True)
        of = Runs.dense(rows, 9)
        parts = [KERNELS["math"].forward(tensors.q, k, v, of, case.scale) for k, v in pairs]
        parts[0].lse[:, :1] = -float("inf")
        parts[0].out[:1] = float("nan")
        got, got_lse = merge(parts)
        outs, lses = [part.out for part in parts], [part.lse for part in parts]
        wanted, lse = merging._merge(outs, lses, torch.bfloat16)
        assert got.is_contiguous() and got_lse.is_contiguous()
        assert_close(got, wanted, num, what="out")
        assert_close(got_lse, lse, num, what="lse")
    assert not [record for record in caplog.records if "without fusion" in record.message]
