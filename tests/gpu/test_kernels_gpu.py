"""CUDA kernels and the fused merge against full attention with a mask in fp64."""

import importlib
import itertools
from dataclasses import replace

import pytest
import torch

from megatron_prefix.errors import UserError
from megatron_prefix.features.context_parallel import own_keys as sums
from megatron_prefix.features.context_parallel import places
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.lab.numerics.working_kernels import available
from megatron_prefix.layers.blocks import merge as merging
from megatron_prefix.layers.blocks import operators
from megatron_prefix.layers.blocks.interface import Partial, Runs
from megatron_prefix.layers.blocks.kernels import KERNELS, choose_kernel
from megatron_prefix.layers.blocks.merge import formula, merge
from megatron_prefix.tree import cp_layout
from tests.harness.attention_cases import CASES, LAYOUTS, Case, by_blocks, check, make

pytestmark = pytest.mark.gpu
NAMES = ("flash", "cudnn", "cudnn+flash", "flash+cudnn", "math")
ODD = {
    "around a tile": Case((300, 64), (63, 64, 65, 129, 2, 1), heads=8, kv_heads=2),
    "equal, odd": Case((257,), (33, 33, 33), heads=8, kv_heads=1),
    "rows beside a lone query": Case((130,), (1,), heads=8, kv_heads=2),
    "rows below a lone key": Case((1,), (40, 40), heads=8, kv_heads=8),
}
LONG = {  # fa4's dense calls, and both calls beside each other
    "one long run": Case((700,), (530,), heads=8, kv_heads=2),
    "long runs": Case((1000, 300), (300, 513, 270), heads=8, kv_heads=2),
    "equal long runs": Case((600,), (300, 300, 300), heads=8, kv_heads=2),
    "many short runs": Case((90,), tuple(range(1, 60)), heads=8, kv_heads=2),
    "more runs than a call takes": Case((90,), (3, 1, 2) * 200, heads=8, kv_heads=2),
}
NO_SPANS = (  # calls that no wave of `CASES` makes: runs with keys of their own, causal or not
    Runs((1,), (2000,)), Runs((2000,), (1,)), Runs((3, 1) * 300, (5, 1) * 300),
    Runs((300, 4, 1), (900, 4, 2000), causal=True), Runs((700,), (1500,), causal=True),
    Runs((2, 1) * 200, (2, 3) * 200, causal=True),
)  # fmt: skip


def working(name, dtype, head_dim, head_dim_v, group=2):
    """The kernel, or a skip that says why this machine cannot run it."""
    try:
        return choose_kernel(name, "cuda", dtype, head_dim, head_dim_v, group=group)
    except UserError as reason:
        pytest.skip(str(reason))


def test_a_fused_kernel_works_on_this_device():
    """At Llama's and Qwen's head width, on any device since Ampere; prints the reasons if not."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the fused kernels need compute capability 8.0")
    reasons = available("cuda", torch.bfloat16, 128)
    assert reasons["math"] is None and reasons["flash"] is None, reasons
    auto = choose_kernel("auto", "cuda", torch.bfloat16, 128).name
    others = ("cudnn or flash by shape", "cudnn", "flash")
    assert auto in (("fa4",) if reasons["fa4"] is None else others), reasons
    assert choose_kernel("auto", "cuda", torch.float64, 128).name == "math"
    assert choose_kernel("auto", "cuda", torch.float32, 128).name == "math"


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(128, torch.bfloat16), (64, torch.float16)], ids=["bf16", "fp16"]
)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", [*CASES.values(), *ODD.values()], ids=[*CASES, *ODD])
def test_blocks_match_full_attention(case, name, head_dim, dtype):
    kernel = working(name, dtype, head_dim, head_dim)
    check(kernel, replace(case, dim=head_dim, dim_v=head_dim), dtype, device="cuda")


@pytest.mark.parametrize("group", [4, 1, 7])
def test_fa4_matches_full_attention(group):
    """One number of query heads a K/V head at a time: it compiles for each."""
    kernel = working("fa4", torch.bfloat16, 128, 128, group)
    for case in (*CASES.values(), *ODD.values(), *LONG.values()):
        heads = dict(heads=2 * group, kv_heads=2, dim=128, dim_v=128)
        check(kernel, replace(case, **heads), torch.bfloat16, device="cuda")


@pytest.mark.parametrize("name", ["flash", "cudnn", "cudnn+flash", "fa4"])
@pytest.mark.parametrize(("queries", "keys"), [
    ((300, 300), (300, 900)), ((64, 64, 65, 65), (64, 192, 65, 260)), ((700,), (2100,)),
], ids=str)  # fmt: skip
def test_causal_runs_with_more_keys_than_queries(name, queries, keys):
    """As of context-parallel ranks, whose K and V lie side by side."""
    kernel, math = working(name, torch.bfloat16, 128, 128, 4), KERNELS["math"]
    compare(kernel, math, Runs(queries, keys, causal=True), (4, 128))


@pytest.mark.parametrize("shape", [(4, 128), (8, 64)], ids=str)
@pytest.mark.parametrize("name", ["flash", "fa4"])
@pytest.mark.parametrize("window", [31, 127])
def test_a_window(name, window, shape):
    """Runs of a layer with a window: own keys, and the last ones of ancestors before them."""
    group, width = shape
    kernel = choose_kernel(name, "cuda", torch.bfloat16, width, group=group, window=window)
    math = KERNELS["math"].windowed(window)
    assert math is not None
    for queries in ((300, 300), (700,), (5, 64, 1, 129, 400), tuple(range(1, 60))):
        keys = tuple(length + min(window, 40 * number) for number, length in enumerate(queries))
        compare(kernel, math, Runs(queries, keys, causal=True), shape)


def compare(kernel, math, runs, shape):
    """Every result of one call, of heads that are (queries a K/V head, width)."""
    group, width = shape
    source = torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(shape, device="cuda", generator=source).to(torch.bfloat16)

    num = sum(runs.queries)
    q, dout = random(num, 2 * group, width), random(num, 2 * group, width)
    both = random(sum(runs.keys), 2, 2 * width)
    k, v = both[..., :width], both[..., width:]
    results = []
    for one in (kernel, math):
        part = one.forward(q, k, v, runs, 0.1)
        results.append([part.out, part.lse, *one.backward(dout, q, k, v, *part, runs, 0.1)])
    terms = max(runs.keys) + group * num
    for got, wanted, what in zip(*results, ("out", "lse", "dq", "dk", "dv"), strict=True):
        assert_close(got, wanted, terms, torch.bfloat16, what)


def test_fa4_reads_a_slice_of_a_cache_as_it_lies():
    """K/V of a range of a layer's arena, K beside V: no copy, and the same numbers as from one."""
    kernel = working("fa4", torch.bfloat16, 128, 128)
    for runs in (Runs.dense(600, 520), Runs((200, 400), (20, 500))):
        arena = torch.randn(4096, 2, 2, 128, device="cuda").to(torch.bfloat16)
        q, dout = (torch.randn(600, 4, 128, device="cuda").to(torch.bfloat16) for _ in range(2))
        k, v = arena[1000:1520, 0], arena[1000:1520, 1]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        part = kernel.forward(q, k, v, runs, 0.1)
        held = torch.cuda.max_memory_allocated() - before
        assert held < 1.1 * (part.out.nbytes + part.lse.nbytes) + (1 << 16)
        copied = kernel.forward(q, k.contiguous(), v.contiguous(), runs, 0.1)
        assert torch.equal(part.out, copied.out) and torch.equal(part.lse, copied.lse)
        truth = KERNELS["math"].forward(q, k, v, runs, 0.1)
        wanted = KERNELS["math"].backward(dout, q, k, v, *truth, runs, 0.1)
        got = kernel.backward(dout, q, k, v, *part, runs, 0.1)
        for one, other, what in zip(got, wanted, ("dq", "dk", "dv"), strict=True):
            assert_close(one, other, 1200, torch.bfloat16, what)


@pytest.mark.parametrize("runs", [Runs.own((900,)), Runs.own((300, 5, 40)), Runs.dense(300, 900)])
def test_fa4_makes_a_call_again(runs, monkeypatch):
    """The layers of a segment: one goes through the package's Python, and all get what it gives."""
    kernel = working("fa4", torch.bfloat16, 128, 128)
    library, calls = operators.flash_attn_4(), []
    called = library._resolve_causal_local_window
    monkeypatch.setattr(
        library, "_resolve_causal_local_window", lambda *args: calls.append(1) or called(*args)
    )
    queries, keys = sum(runs.queries), sum(runs.keys)
    layers = [
        [torch.randn(n, h, 128, device="cuda", dtype=torch.bfloat16) for n, h in
         ((queries, 4), (keys, 2), (keys, 2))]
        for _ in range(3)
    ]  # fmt: skip
    wanted = []
    for layer in layers:
        kernel.begin_step()
        wanted.append(kernel.forward(*layer, runs, 0.1))
    assert len(calls) == 3
    kernel.begin_step()
    got = [kernel.forward(*layer, runs, 0.1) for layer in layers]
    assert len(calls) == 4, "the installed flash-attn-4 is called anew in every layer"
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one.out, other.out) and torch.equal(one.lse, other.lse)


def test_fa4_compiles_before_the_first_step():
    """What probing left to compile would stop a step for seconds."""
    kernel = working("fa4", torch.bfloat16, 128, 128)
    library = importlib.import_module("flash_attn.cute.interface")
    names = ("_flash_attn_fwd", "_bwd_preprocess", "_flash_attn_bwd", "_bwd_postprocess_convert")
    caches = [getattr(library, name).compile_cache.cache for name in names]
    before = [len(cache) for cache in caches]
    assert min(before) > 0
    # What a call of more than 256 runs would need, and nothing needs.
    caches.append(library._compute_tile_cumsum.compile_cache.cache)
    before.append(0)
    for case in (*CASES.values(), *ODD.values(), *LONG.values()):
        alike = replace(case, heads=4, kv_heads=2, dim=128, dim_v=128)
        by_blocks(kernel, alike, make(alike, torch.bfloat16, device="cuda"))
    for runs in NO_SPANS:
        q, k, dout = (
            torch.randn(sum(lengths), heads, 128, device="cuda").to(torch.bfloat16)
            for lengths, heads in ((runs.queries, 4), (runs.keys, 2), (runs.queries, 4))
        )
        part = kernel.forward(q, k, k, runs, 0.1)
        kernel.backward(dout, q, k, k, *part, runs, 0.1)
    assert [len(cache) for cache in caches] == before


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*NAMES, "fa4"])
def test_any_strides(name, layout):
    """One shape in every layout, in both orders: a plan kept for one must not serve another."""
    dtype = torch.float16 if name == "fa4" else torch.bfloat16
    kernel = working(name, dtype, 64, 64)
    for case in (CASES["equal rollouts"], CASES["uneven rollouts"], LONG["one long run"]):
        alike = replace(case, heads=4, kv_heads=2, dim=64, dim_v=64)
        for order in (layout, "contiguous", layout):
            check(kernel, alike, dtype, order, "cuda")


@pytest.mark.parametrize(("name", "widths"), [
    *itertools.product(("cudnn", "math", "fa4"), [(192, 128), (128, 64)]),
    ("fa4", (64, 64)), ("fa4", (256, 256)),
], ids=str)  # fmt: skip
def test_values_of_another_width(name, widths):
    group = 2 if widths[0] == widths[1] else 1  # on Hopper shared heads are as wide as queries
    kernel = working(name, torch.bfloat16, *widths, group)
    long = LONG.values() if name == "fa4" else ()
    for case in (CASES["uneven rollouts"], CASES["three ancestors"], *long):
        heads = dict(heads=2 * group, kv_heads=2, dim=widths[0], dim_v=widths[1])
        check(kernel, replace(case, **heads), torch.bfloat16, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_math_in_full_precision(case, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    check(KERNELS["math"], case, dtype, device="cuda")


@pytest.mark.parametrize("name", ["flash", "cudnn", "fa4"])
def test_no_step_of_a_wave_waits_for_the_device(name):
    """Forward, merge and backward of an uneven wave never seen before, without a host sync."""
    kernel = working(name, torch.bfloat16, 64, 64)
    lengths = (11, 11, 11) if name == "cudnn" else (17, 5, 11)
    case = Case((70, 33), lengths, dim=64, dim_v=64)
    warm = replace(case, lengths=lengths if name == "cudnn" else (11, 17, 5))
    by_blocks(kernel, warm, make(warm, torch.bfloat16, device="cuda"))  # compiles, builds plans
    tensors = make(case, torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        by_blocks(kernel, case, tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_misaligned_tensor_is_refused():
    """The kernels would fault on it, and take the process's CUDA context with them."""
    x = torch.randn(9 * 4 * 64 + 8, device="cuda").to(torch.bfloat16)
    aligned, shifted = (x[start:][: 9 * 4 * 64].view(9, 4, 64) for start in (0, 4))
    for name in ("flash", "cudnn"):
        assert KERNELS[name].refusal(aligned, aligned, aligned) is None
        assert "16 bytes" in (KERNELS[name].refusal(aligned, shifted, aligned) or "")


def test_fp32_is_refused_by_the_fused_kernels():
    reasons = available("cuda", torch.float32, 64)
    assert all("float32" in (reasons[name] or "") for name in ("flash", "cudnn", "fa4"))


@pytest.mark.parametrize("num", [2, 3, 5, 9])
def test_the_fused_merge_is_the_eager_one(num, caplog):
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
        wanted, lse = formula(outs, lses, torch.bfloat16)
        assert got.is_contiguous() and got_lse.is_contiguous()
        assert_close(got, wanted, num, what="out")
        assert_close(got_lse, lse, num, what="lse")
    assert not [record for record in caplog.records if "without fusion" in record.message]


def test_the_fused_merge_compiles_before_the_first_step(caplog):
    """Nothing compiles for new numbers of queries and parts, strides, autocast, a single query."""
    heads, width = 8, 64
    merging.prepare(torch.device("cuda", 0), torch.bfloat16, heads, width)
    kernel = importlib.import_module("megatron_prefix.layers.blocks.merge_triton")._merge_kernel
    (cache, *_) = kernel.device_caches[torch.cuda.current_device()]
    before = len(cache)
    assert before
    for rows in (64, heads, width, 1, 2, 3, 17, 100, 1000, 1024, 8192, 20001):
        for num in (2, 3, 4, 5, 8):
            shape = (num, rows, heads, width)
            outs = list(torch.randn(shape, device="cuda").to(torch.bfloat16))
            lses = [torch.randn(rows, heads, device="cuda").T for _ in outs]
            parts = [Partial(*both) for both in zip(outs, lses, strict=True)]
            parts[0].lse[:, :1] = -float("inf")
            with torch.autocast("cuda", torch.bfloat16, enabled=rows % 2 == 0):
                got, got_lse = merge(parts)
            wanted, lse = formula(outs, lses, torch.bfloat16)
            assert_close(got, wanted, num, what="out")
            assert_close(got_lse, lse, num, what="lse")
    assert len(cache) == before
    assert not [record for record in caplog.records if "without fusion" in record.message]


@pytest.mark.parametrize("begun", [False, True], ids=["new", "begun"])
@pytest.mark.parametrize("width", [(64, 64), (48, 80)], ids=str)
def test_sums_of_own_keys_are_those_of_torch(width, begun, monkeypatch):
    """In one pass, keys in two runs and places without any included."""
    lengths, size, heads = (24, 4 * 123, 8), 2, 3
    for rank in range(size):
        seen = cp_layout.own_runs(lengths, rank, size).visible
        tables = {
            "own": cp_layout.view_order(lengths, size)[seen],
            "own sums": places.own_sums(lengths, rank, size),
        }
        tables = {name: torch.from_numpy(table).cuda() for name, table in tables.items()}
        k, v = (torch.randn(len(seen), heads, w, device="cuda").bfloat16() for w in width)
        begin = torch.randn(sum(lengths), heads, sum(width), device="cuda") if begun else None
        results = []
        for fused in (True, False):
            monkeypatch.setattr(sums, "has_triton", lambda _, fused=fused: fused)
            base = None if begin is None else begin.clone()
            results.append(sums.key_sums((k, v), tables.__getitem__, sum(lengths), base))
        assert results[0].dtype == torch.float32
        assert_close(*results, 3, what="sums")
