"""Every CPU kernel, block by block and merged, against full attention with a mask in fp64."""

import functools

import pytest
import torch

from megatron_prefix.errors import UserError
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.lab.numerics.working_kernels import available
from megatron_prefix.layers.blocks import adaptive, kernels, math, operators
from megatron_prefix.layers.blocks.adaptive import AdaptiveKernel
from megatron_prefix.layers.blocks.batched import batches
from megatron_prefix.layers.blocks.interface import Partial, Runs
from megatron_prefix.layers.blocks.kernels import KERNELS, CompositeKernel, choose_kernel
from megatron_prefix.layers.blocks.merge import merge, with_sink
from megatron_prefix.layers.blocks.operators import MathKernel
from tests.harness.attention_cases import CASES, DTYPES, Tensors, by_blocks, check, expected, make


def test_pieces_of_a_long_span_add_up_before_they_are_rounded(monkeypatch):
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
def test_blocks_match_full_attention(case, name, dtype):
    check(KERNELS[name], case, dtype)


class Named(MathKernel):
    """The exact kernel under another name, remembering its calls and which were causal."""

    def __init__(self, name):
        self.name = name
        self.calls = []

    def forward(self, *args):
        self.calls.append(("forward", args[3].causal))
        return super().forward(*args)

    def backward(self, *args):
        self.calls.append(("backward", args[7].causal))
        return super().backward(*args)


def test_only_causal_runs_go_to_the_second_kernel():
    first, second = Named("first"), Named("second")
    check(CompositeKernel(first, second), CASES["three ancestors"], torch.float64)
    assert first.calls == [("forward", False)] * 3 + [("backward", False)] * 3
    assert second.calls == [("forward", True), ("backward", True)]


def test_math_in_pieces(monkeypatch):
    """A bound on held scores so small that every row is a piece of its own, or two are one."""
    for bound in (1, 2 * 4 * 40):
        monkeypatch.setattr(math, "MAX_SCORES", bound)
        for case in (CASES["uneven rollouts"], CASES["three ancestors"]):
            check(KERNELS["math"], case, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["math", "flash_cpu"])
def test_weights_of_large_scores_add_up_to_one(name, dtype):
    """Values are ones, so an output is the sum of its weights; exp(scores - lse) would add up to
    one but for the rounding of a log-sum-exp of hundreds."""
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(60, 2, 16, generator=draw, dtype=torch.float64).to(dtype) for _ in "qk")
    ones = torch.ones_like(k)
    part = KERNELS[name].forward(q, k, ones, Runs.own((20, 40)), 30.0)
    assert float(part.lse.abs().median()) > 128
    assert_close(part.out, ones, 40)


def test_gradients_where_one_key_has_nearly_all_of_the_weight():
    """Their terms cancel: what a row's weights add up to shows tenfold."""
    case = CASES["one span, no ancestor"]
    tensors = make(case, torch.float64)
    tensors = tensors._replace(q=70 * tensors.q)
    wanted = expected(case, tensors)
    assert float(wanted["lse"].abs().max()) > 250
    assert_close(by_blocks(KERNELS["math"], case, tensors)["dq"], wanted["dq"], 37)


def test_no_keys_count_for_nothing():
    q, empty = torch.randn(3, 4, 8), torch.randn(0, 2, 8)
    out, lse = math.attend(q[None], empty[None], empty[None], 1.0, causal=False)
    assert torch.equal(out, torch.zeros(1, 3, 4, 8))
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize("lengths", [(), (0, 12), (5, 6), (13,), (14, -2)])
def test_lengths_that_do_not_fit_are_refused(lengths):
    q = torch.randn(12, 2, 8)
    for kernel in KERNELS.values():
        with pytest.raises(ValueError, match="sum to 12"):
            kernel.forward(q, q, q, Runs.own(lengths), 1.0)


@pytest.mark.parametrize("name", ["flash", "cudnn"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_cuda_calls_fit_the_operators_of_this_torch(case, name):
    """On meta tensors: schemas, argument order and shapes, without a GPU."""
    tensors = make(case, torch.bfloat16, "qkv")
    meta = Tensors(
        tensors.q.to("meta"), [x.to("meta") for x in tensors.keys],
        [x.to("meta") for x in tensors.values], tensors.dout.to("meta"),
    )  # fmt: skip
    got = by_blocks(KERNELS[name], case, meta)
    for key, value in expected(case, tensors).items():
        assert got[key].shape == value.shape, key
        assert got[key].dtype == (torch.float32 if key == "lse" else torch.bfloat16), key


def test_refusals_name_what_is_wrong():
    q, k = torch.randn(5, 4, 8), torch.randn(7, 2, 8)
    for kernel in (KERNELS["math"], KERNELS["flash_cpu"]):
        assert kernel.refusal(q, k, k) is None
        assert "float64" in (kernel.refusal(q, k.double(), k) or "")
        assert "(7, 2, 8)" in (kernel.refusal(q[:, :3], k, k) or "")
        assert "contiguous" in (kernel.refusal(q, k.transpose(1, 2).contiguous().mT, k) or "")
    assert "CUDA" in (KERNELS["cudnn"].refusal(q, k, k) or "")


@pytest.mark.parametrize(("name", "message"), [
    ("flash", "'flash' does not work here: needs a CUDA device, got cpu; use math, flash_cpu"),
    ("math+cudnn", "'cudnn' does not work here"),
    ("fa9", "'fa9' is not auto, one of math, flash_cpu, flash, cudnn, fa4, or a"),
    ("math+math+math", "is not auto"),
    ("math+", "is not auto"),
])  # fmt: skip
def test_a_kernel_that_cannot_work_is_a_user_error(name, message):
    with pytest.raises(UserError, match=message.replace("+", r"\+")):
        choose_kernel(name, "cpu", torch.float32, 16)


class _Wrong(operators.FlashCpuKernel):
    """One gradient is off by a factor that only a comparison can see."""

    def attend_backward(self, *args):
        dq, dk, dv = super().attend_backward(*args)
        return dq, 1.01 * dk, dv


class _Broken(operators.FlashCpuKernel):
    def attend(self, *args):
        raise RuntimeError("no such kernel image\nand a second line")


class _WrongPairs(operators.FlashCpuKernel):
    """Only rollouts with keys of their own come out wrong."""

    def forward(self, q, k, v, runs, scale):
        part = super().forward(q, k, v, runs, scale)
        wrong = not runs.causal and len(runs.queries) > 1
        return part._replace(out=1.01 * part.out) if wrong else part


@pytest.mark.parametrize(("kernel", "reason"), [
    (_Wrong(), "relative error"),
    (_WrongPairs(), "relative error"),
    (_Broken(), "no such kernel image"),
])  # fmt: skip
def test_probing_refuses_a_broken_kernel(kernel, reason, monkeypatch):
    monkeypatch.setitem(KERNELS, "flash_cpu", kernel)
    monkeypatch.setattr(kernels, "probed", functools.cache(kernels.probed.__wrapped__))
    found = available("cpu", torch.float32, 16)["flash_cpu"]
    assert found is not None and reason in found and "\n" not in found
    assert choose_kernel("auto", "cpu", torch.float32, 16).name == "math"
    with pytest.raises(UserError, match=reason):
        choose_kernel("flash_cpu", "cpu", torch.float32, 16)


RUNS = {
    "one": Runs.dense(9, 9), "equal": Runs((3, 3, 3), (3, 3, 3)), "causal": Runs.own((3, 6)),
    "paired": Runs((3, 6), (4, 5)),
}  # fmt: skip


def _off_by_8_bytes(x):
    return torch.cat([x.flatten()[:4], x.flatten()])[4:].view(x.shape)


class _Reached(Exception):
    """The operator would be called now."""


def _reached(*args, **kwargs):
    raise _Reached


class _Operators:
    """Stands in for torch's."""

    def __getattr__(self, name):
        return _reached


@pytest.mark.parametrize("name", ["flash", "cudnn"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_every_call_is_guarded_against_misaligned_tensors(runs, backward, name, monkeypatch):
    """The kernels would fault on them; what a guard reads is the same on the CPU."""
    kernel = KERNELS[name]
    for method in ("attend", "attend_backward"):
        monkeypatch.setattr(kernel, method, _reached)
    monkeypatch.setattr(operators, "aten", _Operators())
    x = torch.zeros(9, 2, 8, dtype=torch.bfloat16)
    tensors = ["dout", "q", "k", "v", "out"] if backward else ["q", "k", "v"]
    aux = ((),) * len(batches(runs, 9, 9))
    rest = (*((torch.zeros(2, 9), aux) if backward else ()), runs, 1.0)

    def run(wrong, odd):
        call = kernel.backward if backward else kernel.forward
        call(*(odd if one == wrong else x for one in tensors), *rest)

    for wrong in tensors:
        with pytest.raises(UserError, match="8 bytes off; give --kernel math"):
            run(wrong, _off_by_8_bytes(x))
    narrow = torch.zeros(9, 2, 12, dtype=torch.bfloat16)[..., :8]
    with pytest.raises(UserError, match=r"aligned to 16 bytes, got strides \(24, 12, 1\)"):
        run("k", narrow)
    with pytest.raises(_Reached):
        run("k", x)


# Which kernel a shape gets, and that a step's choices hold together -------------------------------


@pytest.fixture
def pair(monkeypatch):
    """A planned and a ready kernel; a plan costs what a [8, 2] by [8] block saves in two steps."""
    flops = 3.5 * 4 * 64 * 2 * 4
    monkeypatch.setattr(adaptive, "FLASH_RATE", 1.0)
    monkeypatch.setattr(adaptive, "CUDNN_RATE", 2.0)
    monkeypatch.setattr(adaptive, "PLAN_S", flops * 0.5 * 3 * 2)
    planned, ready = Named("planned"), Named("ready")
    return planned, ready, AdaptiveKernel(planned, ready, num_layers=3)


def rows(num, heads=2):
    return torch.randn(num, heads, 4, dtype=torch.float64)


def test_a_shape_earns_its_plan_between_steps(pair):
    planned, ready, kernel = pair
    q, k, v = rows(8), rows(8), rows(8)
    for step, runs_on in enumerate((ready, planned, planned)):
        before = len(runs_on.calls)
        kernel.begin_step()
        for _ in range(3):
            kernel.forward(q, k, v, Runs.dense(8, 8), 0.5)
        assert len(runs_on.calls) == before + 3, f"step {step}"


def test_backward_stays_with_the_forwards_kernel(pair):
    planned, ready, kernel = pair
    q, k, v, dout = rows(8), rows(8), rows(8), rows(8)
    kernel.begin_step()
    runs = Runs.own((3, 5))
    part = kernel.forward(q, k, v, runs, 0.5)
    kernel.begin_step()  # by now the shape may have earned a plan
    got = kernel.backward(dout, q, k, v, *part, runs, 0.5)
    assert ("backward", True) in ready.calls
    assert planned.calls == []
    exact = MathKernel()
    truth = exact.forward(q, k, v, runs, 0.5)
    wanted = exact.backward(dout, q, k, v, *truth, runs, 0.5)
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other, 8)


# The log-sum-exp merge against one softmax over all keys, and its corner cases --------------------

HEADS, DIM, ROWS = 4, 8, 11


def random_rows(num, heads, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, heads, DIM, generator=generator, dtype=torch.float64).to(dtype)


def random_part(seed, dtype=torch.float64, rows=ROWS):
    out = random_rows(rows, HEADS, dtype, seed)
    lse = random_rows(rows, HEADS, torch.float64, seed + 1000).sum(-1).T.contiguous()
    return Partial(out, lse if dtype is torch.float64 else lse.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("garbage", [0.0, float("nan"), float("inf")])
def test_a_block_without_keys_counts_for_exactly_nothing(dtype, garbage):
    part = random_part(0, dtype)
    dead = Partial(torch.full_like(part.out, garbage), torch.full_like(part.lse, -float("inf")))
    for parts in ([part, dead], [dead, part], [dead, part, dead]):
        out, lse = merge(parts)
        assert torch.equal(out, part.out) and torch.equal(lse, part.lse)


def test_a_nan_that_counts_is_not_hidden():
    good, bad = random_part(0), random_part(1)
    bad.out[2, 0, 0] = bad.lse[1, 5] = float("nan")
    out, lse = merge([good, bad])
    assert torch.isnan(out[2, 0, 0]) and torch.isnan(out[5, 1]).all() and torch.isnan(lse[1, 5])
    assert int(torch.isnan(out).sum()) == 1 + DIM


def test_large_scores_neither_overflow_nor_vanish():
    # Multiples of 1/64 stay exact in fp32 when 8192 is added, so nothing at all may change.
    parts = [random_part(i, torch.float32) for i in range(3)]
    parts = [Partial(part.out, (part.lse * 64).round() / 64) for part in parts]
    out, _ = merge(parts)
    for shift in (8192.0, -8192.0):
        far, far_lse = merge([Partial(part.out, part.lse + shift) for part in parts])
        assert torch.equal(far, out) and torch.isfinite(far_lse).all()
    dominated, _ = merge([parts[0], Partial(parts[1].out, parts[1].lse - 8192.0)])
    assert torch.equal(dominated, parts[0].out)


def test_a_sink_beside_large_scores_costs_no_accuracy():
    """Against fp64: the merged log-sum-exp is rounded by more than the share may be off."""
    draw = torch.Generator().manual_seed(0)
    lse = 250 + torch.randn(HEADS, 100, generator=draw)
    sink = 250 + torch.randn(HEADS, generator=draw)
    out, total = with_sink(torch.ones(100, HEADS, DIM), lse, sink)
    share = 1 / (1 + torch.exp(sink.double()[:, None] - lse.double()))
    assert_close(out, share.T[..., None].expand(out.shape), 2)
    assert_close(total, torch.logaddexp(lse.double(), sink.double()[:, None]), 2)
