"""Every CPU kernel, block by block and merged, against full attention with a mask in fp64."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_prefix.errors import UserError
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.lab.numerics.working_kernels import available
from megatron_prefix.layers.blocks import kernels, math, operators
from megatron_prefix.layers.blocks.batched import Batch, batches
from megatron_prefix.layers.blocks.interface import Kernel, Partial, Runs
from megatron_prefix.layers.blocks.kernels import KERNELS, CompositeKernel, choose_kernel
from tests.harness.attention_cases import (
    CASES,
    DTYPES,
    LAYOUTS,
    NARROW,
    WIDE,
    Case,
    Tensors,
    by_blocks,
    check,
    expected,
    make,
)


def test_pieces_of_a_long_span_add_up_before_they_are_rounded(monkeypatch) -> None:
    """One key: dV is the sum over 300 queries, which bf16 does not have one by one."""
    ones = torch.ones(1, 300, 1, 4, dtype=torch.bfloat16)
    key = torch.zeros(1, 1, 1, 4, dtype=torch.bfloat16)
    monkeypatch.setattr(math, "MAX_SCORES", 1)
    out, lse = math.attend(ones, key, key, 1.0, False)
    *_, value_grad = math.attend_backward(ones, ones, key, key, out, lse, 1.0, False)
    assert value_grad.flatten().tolist() == [300.0] * 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["math", "flash_cpu"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_blocks_match_full_attention(case: Case, name: str, dtype: torch.dtype) -> None:
    check(KERNELS[name], case, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["math", "flash_cpu"])
def test_any_strides_without_copies(name: str, layout: str) -> None:
    check(KERNELS[name], CASES["uneven rollouts"], torch.float32, layout)
    check(KERNELS[name], CASES["equal rollouts"], torch.float32, layout)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [NARROW, WIDE], ids=["dv < d", "dv > d"])
def test_values_of_another_width(case: Case, dtype: torch.dtype) -> None:
    check(KERNELS["math"], case, dtype, "buffer")
    tensors = make(case, dtype)
    refusal = KERNELS["flash_cpu"].refusal(tensors.q, tensors.keys[0], tensors.values[0])
    assert refusal is not None and str(case.dim_v) in refusal


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_composite_takes_each_block_to_its_kernel(case: Case) -> None:
    check(CompositeKernel(KERNELS["math"], KERNELS["flash_cpu"]), case, torch.float64)
    check(CompositeKernel(KERNELS["flash_cpu"], KERNELS["math"]), case, torch.float32)


@pytest.mark.parametrize("window", [1, 4, 9, 100])
def test_a_window_of_math_is_a_mask(window: int) -> None:
    """Causal runs with as many keys as queries, and with more; against the formula by rows."""
    kernel = KERNELS["math"].windowed(window)
    assert kernel is not None and KERNELS["math"].window is None
    draw = torch.Generator().manual_seed(0)
    for queries, keys in (((7, 12), (7, 12)), ((7, 12), (15, 14))):
        q, dout = (torch.randn(19, 4, 8, generator=draw, dtype=torch.float64) for _ in "ab")
        k, v = (torch.randn(sum(keys), 2, 8, generator=draw, dtype=torch.float64) for _ in "ab")
        for x in (q, k, v):
            x.requires_grad_()
        part = kernel.forward(q, k, v, Runs(queries, keys, causal=True), 0.3)
        grads = kernel.backward(dout, q, k, v, *part, Runs(queries, keys, causal=True), 0.3)
        rows, first, begin = [], 0, 0
        for length, seen in zip(queries, keys, strict=True):
            for number in range(length):
                last = begin + seen - length + number
                low = max(begin, last - window)
                heads = [x[low : last + 1].repeat_interleave(2, 1) for x in (k, v)]
                scores = 0.3 * torch.einsum("hd,khd->hk", q[first + number], heads[0])
                rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), heads[1]))
            first, begin = first + length, begin + seen
        wanted = torch.stack(rows)
        wanted.backward(dout)
        for found, x in zip((part.out, *grads), (wanted, q.grad, k.grad, v.grad), strict=True):
            assert x is not None and torch.allclose(found, x, rtol=0, atol=1e-12)


def test_kernels_without_a_window_say_so() -> None:
    assert KERNELS["flash_cpu"].windowed(3) is None
    cpu = torch.device("cpu")
    assert choose_kernel("auto", cpu, torch.float32, 8, window=3).name == "math"
    with pytest.raises(UserError, match="has no sliding window; use math"):
        choose_kernel("flash_cpu", cpu, torch.float32, 8, window=3)


class _Recorded(operators.MathKernel):
    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []

    def forward(self, *args: object) -> Partial:
        self.calls.append(("forward", args[3].causal))  # type: ignore[attr-defined]
        return super().forward(*args)  # type: ignore[arg-type]

    def backward(self, *args: object) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append(("backward", args[7].causal))  # type: ignore[attr-defined]
        return super().backward(*args)  # type: ignore[arg-type]


def test_only_causal_runs_go_to_the_second_kernel() -> None:
    first, second = _Recorded(), _Recorded()
    check(CompositeKernel(first, second), CASES["three ancestors"], torch.float64)
    assert first.calls == [("forward", False)] * 3 + [("backward", False)] * 3
    assert second.calls == [("forward", True), ("backward", True)]


def test_math_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound on held scores so small that every row is a piece of its own, or two are one."""
    for bound in (1, 2 * 4 * 40):
        monkeypatch.setattr(math, "MAX_SCORES", bound)
        for case in (CASES["uneven rollouts"], CASES["three ancestors"]):
            check(KERNELS["math"], case, torch.float64)


def test_math_bounds_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor of scores stays within the bound for a row that would not fit."""
    seen: list[int] = []
    for name in ("logsumexp", "exp_"):  # of scores, forward and backward
        stock = getattr(torch, name)

        def spy(x: Tensor, *rest: Any, stock: Any = stock, **more: Any) -> Tensor:
            seen.append(x.numel())
            return stock(x, *rest, **more)

        monkeypatch.setattr(torch, name, spy)
    monkeypatch.setattr(math, "MAX_SCORES", 4096)
    tensors, runs = make(Case((), (64,)), torch.float64), Runs.own((64,))
    rows = (tensors.q, tensors.keys[0], tensors.values[0])
    part = KERNELS["math"].forward(*rows, runs, 0.25)
    forward = len(seen)
    KERNELS["math"].backward(tensors.dout, *rows, *part, runs, 0.25)
    assert len(seen) == 2 * forward > 4 and max(seen) <= 4096


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["math", "flash_cpu"])
def test_weights_of_large_scores_add_up_to_one(name: str, dtype: torch.dtype) -> None:
    """Values are ones, so an output is the sum of its weights; exp(scores - lse) would add up to
    one but for the rounding of a log-sum-exp of hundreds."""
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(60, 2, 16, generator=draw, dtype=torch.float64).to(dtype) for _ in "qk")
    ones = torch.ones_like(k)
    part = KERNELS[name].forward(q, k, ones, Runs.own((20, 40)), 30.0)
    assert float(part.lse.abs().median()) > 128
    assert_close(part.out, ones, 40)


def test_gradients_where_one_key_has_nearly_all_of_the_weight() -> None:
    """Their terms cancel: what a row's weights add up to shows tenfold."""
    case = CASES["one span, no ancestor"]
    tensors = make(case, torch.float64)
    tensors = tensors._replace(q=70 * tensors.q)
    wanted = expected(case, tensors)
    assert float(wanted["lse"].abs().max()) > 250
    assert_close(by_blocks(KERNELS["math"], case, tensors)["dq"], wanted["dq"], 37)


def test_no_keys_count_for_nothing() -> None:
    q, empty = torch.randn(3, 4, 8), torch.randn(0, 2, 8)
    out, lse = math.attend(q[None], empty[None], empty[None], 1.0, causal=False)
    assert torch.equal(out, torch.zeros(1, 3, 4, 8))
    assert torch.isneginf(lse).all()


@settings(max_examples=60, deadline=None)
@given(
    ancestors=st.lists(st.integers(1, 20), max_size=4),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    name=st.sampled_from(["math", "flash_cpu"]),
    layout=st.sampled_from(LAYOUTS),
)
def test_random_waves(
    ancestors: list[int], lengths: list[int], kv_heads: int, group: int, name: str, layout: str
) -> None:
    case = Case(tuple(ancestors), tuple(lengths), group * kv_heads, kv_heads, dim=8, dim_v=8)
    check(KERNELS[name], case, torch.float64, layout)


def test_single_call_where_one_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row and equal rollouts are one call; so is a run of equal rollouts among others."""
    kernel = operators.FlashCpuKernel()
    calls: list[torch.Size] = []
    stock = kernel.attend

    def spy(q: Tensor, *args: object) -> object:
        calls.append(q.shape)
        return stock(q, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(kernel, "attend", spy)
    for lengths, shapes in (
        ((12,), [(1, 12)]),
        ((4, 4, 4), [(3, 4)]),
        ((4, 4, 3, 1), [(2, 4), (1, 3), (1, 1)]),
    ):
        calls.clear()
        q = torch.randn(12, 4, 8)
        kernel.forward(q, q[:, :2], q[:, :2], Runs.own(lengths), 1.0)
        assert [tuple(shape[:2]) for shape in calls] == shapes


def test_one_row_is_passed_on_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of a fused projection and of a cache reach the operator as they lie in memory."""
    seen: list[Tensor] = []

    class Spy:
        def _scaled_dot_product_flash_attention_for_cpu(
            self, *args: Tensor, **kwargs: float
        ) -> tuple[Tensor, Tensor]:
            seen.extend(args[:3])
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args, **kwargs)

    monkeypatch.setattr(operators, "aten", Spy())
    case = Case((9,), (6,))
    q, keys, values, _ = make(case, torch.float32, "qkv")
    KERNELS["flash_cpu"].forward(q, keys[-1], values[-1], Runs.own(case.lengths), 1.0)
    KERNELS["flash_cpu"].forward(q, keys[0], values[0], Runs.dense(6, 9), 1.0)
    sources = (q, keys[-1], values[-1], q, keys[0], values[0])
    for got, source in zip(seen, sources, strict=True):
        assert got.data_ptr() == source.data_ptr()


@pytest.mark.parametrize("name", ["math", "flash_cpu"])
def test_outputs_are_contiguous(name: str) -> None:
    """So that the caller's reshape to [positions, heads * width] is free, also from a fused QKV."""
    for case in (CASES["one span, no ancestor"], CASES["equal rollouts"], CASES["uneven rollouts"]):
        tensors = make(case, torch.float32, "qkv")
        own = (tensors.q, tensors.keys[-1], tensors.values[-1])
        part = KERNELS[name].forward(*own, Runs.own(case.lengths), 1.0)
        assert part.out.is_contiguous()
        assert part.lse.shape == (case.heads, sum(case.lengths))


@pytest.mark.parametrize("lengths", [(), (0, 12), (5, 6), (13,), (14, -2)])
def test_lengths_that_do_not_fit_are_refused(lengths: tuple[int, ...]) -> None:
    q = torch.randn(12, 2, 8)
    for kernel in KERNELS.values():
        with pytest.raises(ValueError, match="sum to 12"):
            kernel.forward(q, q, q, Runs.own(lengths), 1.0)


def test_causal_runs_have_a_key_for_every_query() -> None:
    q = torch.randn(12, 2, 8)
    for kernel in KERNELS.values():
        with pytest.raises(ValueError, match=r"causal runs of \(5, 7\) queries"):
            kernel.forward(q, q, q, Runs((5, 7), (7, 5), causal=True), 1.0)


def test_equal_neighbours_are_one_batch() -> None:
    found = batches(Runs((5, 5, 2, 5), (3, 3, 3, 4)), 17, 13)
    assert [mine for mine, _ in found] == [Batch(0, 2, 5), Batch(10, 1, 2), Batch(12, 1, 5)]
    assert [seen for _, seen in found] == [Batch(0, 2, 3), Batch(6, 1, 3), Batch(9, 1, 4)]


@pytest.mark.parametrize("name", ["flash", "cudnn"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_cuda_calls_fit_the_operators_of_this_torch(case: Case, name: str) -> None:
    """On meta tensors: schemas, argument order and shapes, without a GPU."""
    tensors = make(case, torch.bfloat16, "qkv")
    meta = Tensors(
        tensors.q.to("meta"),
        [x.to("meta") for x in tensors.keys],
        [x.to("meta") for x in tensors.values],
        tensors.dout.to("meta"),
    )
    got = by_blocks(KERNELS[name], case, meta)
    for key, value in expected(case, tensors).items():
        assert got[key].shape == value.shape, key
        assert got[key].dtype == (torch.float32 if key == "lse" else torch.bfloat16), key


def test_runs_are_equal_by_value() -> None:
    assert Runs.own((2, 3)) == Runs((2, 3), (2, 3), True) != Runs((2, 3), (2, 3))
    assert len({Runs.own((2, 3)), Runs.own((2, 3)), Runs.dense(5, 5)}) == 2


def test_layouts_that_differ_beyond_single_positions_are_copied() -> None:
    x = torch.randn(1, 4, 6, 8)
    same = operators.laid_out(x, (777, 48, 8, 1))
    assert same.data_ptr() == x.data_ptr() and same.stride() == (777, 48, 8, 1)
    other = operators.laid_out(x, (192, 8, 32, 1))
    assert other.stride() == (192, 8, 32, 1) and torch.equal(other, x)


def test_refusals_name_what_is_wrong() -> None:
    q, k = torch.randn(5, 4, 8), torch.randn(7, 2, 8)
    for kernel in (KERNELS["math"], KERNELS["flash_cpu"]):
        assert kernel.refusal(q, k, k) is None
        assert "float64" in (kernel.refusal(q, k.double(), k) or "")
        assert "(7, 2, 8)" in (kernel.refusal(q[:, :3], k, k) or "")
        assert "contiguous" in (kernel.refusal(q, k.transpose(1, 2).contiguous().mT, k) or "")
    assert "CUDA" in (KERNELS["cudnn"].refusal(q, k, k) or "")


@pytest.mark.parametrize(
    ("dtype", "best"),
    [(torch.float64, "math"), (torch.float32, "flash_cpu"), (torch.bfloat16, "flash_cpu")],
)
def test_auto_on_the_cpu(dtype: torch.dtype, best: str) -> None:
    assert choose_kernel("auto", "cpu", dtype, 16).name == best
    assert choose_kernel("auto", "cpu", dtype, 24, 16).name == "math"
    assert choose_kernel("flash_cpu+math", "cpu", dtype, 16).name == "flash_cpu+math"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flash", "'flash' does not work here: runs on CUDA, got cpu; use math, flash_cpu"),
        ("math+cudnn", "'cudnn' does not work here"),
        ("fa9", "'fa9' is not auto, one of math, flash_cpu, flash, cudnn, fa4, or a"),
        ("math+math+math", "is not auto"),
        ("math+", "is not auto"),
    ],
)
def test_a_kernel_that_cannot_work_is_a_user_error(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("+", r"\+")):
        choose_kernel(name, "cpu", torch.float32, 16)


class _Wrong(operators.FlashCpuKernel):
    """One gradient is off by a factor that only a comparison can see."""

    def attend_backward(self, *args: object) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = super().attend_backward(*args)  # type: ignore[arg-type]
        return dq, 1.01 * dk, dv


class _Broken(operators.FlashCpuKernel):
    def attend(self, *args: object) -> tuple[Tensor, Tensor, tuple[()]]:
        raise RuntimeError("no such kernel image\nand a second line")


class _WrongPairs(operators.FlashCpuKernel):
    """Only rollouts with keys of their own come out wrong."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float) -> Partial:
        part = super().forward(q, k, v, runs, scale)
        wrong = not runs.causal and len(runs.queries) > 1
        return part._replace(out=1.01 * part.out) if wrong else part


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (_Wrong(), "relative error"),
        (_WrongPairs(), "relative error"),
        (_Broken(), "no such kernel image"),
    ],
)
def test_probing_refuses_a_broken_kernel(
    kernel: Kernel, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KERNELS, "flash_cpu", kernel)
    monkeypatch.setattr(kernels, "probed", functools.cache(kernels.probed.__wrapped__))
    found = available("cpu", torch.float32, 16)["flash_cpu"]
    assert found is not None and reason in found and "\n" not in found
    assert choose_kernel("auto", "cpu", torch.float32, 16).name == "math"
    with pytest.raises(UserError, match=reason):
        choose_kernel("flash_cpu", "cpu", torch.float32, 16)


RUNS = {
    "one": Runs.dense(9, 9),
    "equal": Runs((3, 3, 3), (3, 3, 3)),
    "causal": Runs.own((3, 6)),
    "paired": Runs((3, 6), (4, 5)),
}


def _off_by_8_bytes(x: Tensor) -> Tensor:
    return torch.cat([x.flatten()[:4], x.flatten()])[4:].view(x.shape)


class _Reached(Exception):
    """The operator would be called now."""


def _reached(*args: object, **kwargs: object) -> None:
    raise _Reached


class _Operators:
    """Stands in for torch's."""

    def __getattr__(self, name: str) -> Any:
        return _reached


@pytest.mark.parametrize("name", ["flash", "cudnn"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_every_call_is_guarded_against_misaligned_tensors(
    runs: Runs, backward: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels would fault on them; what a guard reads is the same on the CPU."""
    kernel = KERNELS[name]
    for method in ("attend", "attend_backward"):
        monkeypatch.setattr(kernel, method, _reached)
    monkeypatch.setattr(operators, "aten", _Operators())
    x = torch.zeros(9, 2, 8, dtype=torch.bfloat16)
    tensors = ["dout", "q", "k", "v", "out"] if backward else ["q", "k", "v"]
    aux = ((),) * len(batches(runs, 9, 9))
    rest = (*((torch.zeros(2, 9), aux) if backward else ()), runs, 1.0)

    def run(wrong: str, odd: Tensor) -> None:
        call = kernel.backward if backward else kernel.forward
        call(*(odd if one == wrong else x for one in tensors), *rest)  # type: ignore[arg-type]

    for wrong in tensors:
        with pytest.raises(UserError, match="8 bytes off; give --kernel math"):
            run(wrong, _off_by_8_bytes(x))
    narrow = torch.zeros(9, 2, 12, dtype=torch.bfloat16)[..., :8]
    with pytest.raises(UserError, match=r"aligned to 16 bytes, got strides \(24, 12, 1\)"):
        run("k", narrow)
    with pytest.raises(_Reached):
        run("k", x)


def test_probing_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    kernels.probed.__wrapped__("flash_cpu", torch.device("cpu"), torch.float32, 16, 16)
    assert torch.equal(before, torch.get_rng_state())


def test_the_reference_sees_a_wrong_block() -> None:
    """A wave whose rollouts see each other, or miss an ancestor, does not pass."""
    case = CASES["uneven rollouts"]
    tensors = make(case, torch.float64)
    wanted = expected(case, tensors)
    for wrong in (replace(case, lengths=(8, 0 + 1, 12, 13, 2)), replace(case, ancestors=())):
        trimmed = tensors
        if not wrong.ancestors:
            trimmed = tensors._replace(keys=tensors.keys[1:], values=tensors.values[1:])
        got = by_blocks(KERNELS["math"], wrong, trimmed)
        with pytest.raises(AssertionError):
            assert_close(got["out"], wanted["out"], case.reduction_length)
