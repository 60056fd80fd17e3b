"""How `fa4` calls flash-attn-4, on a stand-in with the package's layouts; and when it is chosen."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from megatron_prefix.errors import UserError
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.layers.blocks import kernels, operators
from megatron_prefix.layers.blocks.batched import batches
from megatron_prefix.layers.blocks.interface import Runs
from megatron_prefix.layers.blocks.kernels import KERNELS, choose_kernel
from megatron_prefix.layers.blocks.repeated import Repeated
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

    def __init__(self):
        self.calls = []

    def runs(self, q, k, call):
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
def library(monkeypatch):
    found = StandIn()
    monkeypatch.setattr(operators, "flash_attn_4", lambda: found)
    return found


@pytest.mark.parametrize("case", [*CASES.values(), *LONG.values()], ids=[*CASES, *LONG])
def test_blocks_match_full_attention(case, library):
    check(FA4, case, torch.bfloat16)
    assert library.calls


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout, library):
    check(FA4, CASES["uneven rollouts"], torch.bfloat16, layout)
    check(FA4, LONG["one long run"], torch.float16, layout)


def test_values_of_another_width(library):
    check(FA4, replace(NARROW, kv_heads=4), torch.bfloat16, "buffer")
    check(FA4, replace(LONG["one long run"], dim_v=8), torch.bfloat16, "buffer")


@pytest.mark.parametrize("num", [256, 257, 600])
def test_more_runs_are_several_calls(num, library):
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


def refusal(monkeypatch, capability, width, width_v, group=2):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    shapes = (2 * group, width), (2, width), (2, width_v)
    return FA4.refusal(*(on_cuda(torch.empty(4, *one, dtype=torch.bfloat16)) for one in shapes))


@pytest.mark.parametrize(("capability", "widths", "group", "reason"), [
    ((9, 0), (128, 128), 4, None), ((9, 0), (192, 128), 1, None),
    ((9, 0), (192, 128), 2, "as wide as queries"), ((9, 0), (256, 256), 4, None),
    ((10, 0), (192, 128), 4, None), ((10, 3), (256, 256), 4, None),
    ((10, 0), (192, 192), 4, "up to 128"), ((8, 0), (128, 128), 4, "got 8.0"),
    ((12, 0), (128, 128), 4, "got 12.0"),
])  # fmt: skip
def test_devices_and_widths(capability, widths, group, reason, library, monkeypatch):
    found = refusal(monkeypatch, capability, *widths, group)
    assert (found is None) if reason is None else (found is not None and reason in found)


def test_a_missing_package_is_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}\nand more")

    monkeypatch.setattr(operators.importlib, "import_module", missing)
    monkeypatch.setattr(operators, "flash_attn_4", REAL_FA4.__wrapped__)
    found = refusal(monkeypatch, (9, 0), 128, 128) or ""
    assert "pip install flash-attn-4==" in found and "flash_attn.cute" in found
    assert "\n" not in found


@pytest.fixture
def reasons(monkeypatch):
    """What probing finds, and for which kernels it was asked."""
    found, asked = dict.fromkeys(KERNELS), []

    def probed(name, *heads):
        asked.append(name)
        return found[name]

    monkeypatch.setattr(kernels, "probed", probed)
    return found, asked


def test_auto_prefers_it_where_it_works(reasons):
    found, asked = reasons

    def auto():
        return choose_kernel("auto", "cuda:0", torch.bfloat16, 128).name

    assert auto() == "fa4" and asked == ["fa4"]
    found["fa4"] = "runs on Hopper and Blackwell"
    assert auto() == "cudnn or flash by shape"
    found["flash"] = "broken"
    assert auto() == "cudnn"
    found["cudnn"], found["flash"] = "broken", None
    assert auto() == "flash"
    assert choose_kernel("auto", "cuda:0", torch.float64, 128).name == "math"


def test_only_kernels_that_could_be_chosen_are_tried(reasons):
    found, asked = reasons
    choose_kernel("cudnn+flash", "cuda:0", torch.bfloat16, 128)
    assert asked == ["cudnn", "flash"]
    found["fa4"] = "no"
    with pytest.raises(UserError, match="'fa4' does not work here: no; use math, flash_cpu, flash"):
        choose_kernel("fa4", "cuda:0", torch.bfloat16, 128)


# Forwards of flash-attn-4 that are made again, on a stand-in with its cache of kernels ------------


class Aux(NamedTuple):
    """As flash_attn.cute's, without tensors of a mask."""

    tensors: Any = None


class Library:
    """`_flash_attn_fwd`: a function that finds its kernel in an attribute of its own."""

    def __init__(self):
        self.calls = self.launches = 0  # of the function, and of kernels
        self.change = lambda arguments: None  # before a launch

        def function(q, k, v, *, scale, starts=None):
            self.calls += 1
            out, lse = torch.empty(q.shape), torch.empty(q.shape[::-1][1:])
            arguments = [*(x.detach() for x in (q, k, v)), out.detach(), lse, scale, starts, Aux()]
            again = self.change(arguments)
            if "key" not in function.compile_cache:
                function.compile_cache["key"] = self.kernel
            for _ in range(2 if again else 1):
                function.compile_cache["key"](*arguments)
            return out, lse, None

        function.compile_cache = {}
        self.function = function

    def kernel(self, q, k, v, out, lse, *more):
        """Something of all that it gets."""
        self.launches += 1
        scale, starts, aux = more
        assert aux == Aux() and not any(x.requires_grad for x in (q, k, v))
        torch.mul(q + 2 * k + 3 * v, scale, out=out)
        torch.add(out.sum(-1).T, 0 if starts is None else starts.sum(), out=lse)


def tensors(seed, **options):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 2, 4, generator=draw).requires_grad_() for _ in range(3)]


def compare(repeated, library, given, **options):
    """With what the function gives when nobody watches it."""
    wanted = Library().function(*given, **options)
    got = repeated(library.function, *given, **options)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=False))
    assert type(library.function.compile_cache) is dict


def test_calls_of_a_layout_are_made_once():
    library, repeated, starts = Library(), Repeated(), torch.tensor([0, 5])
    for number in range(4):
        compare(repeated, library, tensors(number), scale=0.5, starts=starts)
    assert (library.calls, library.launches) == (1, 4)


def test_other_layouts_and_options_are_other_calls():
    library, repeated, starts = Library(), Repeated(), torch.tensor([0, 5])
    wide = [torch.randn(5, 2, 8)[..., ::2] for _ in range(3)]
    for _ in range(2):
        compare(repeated, library, tensors(0), scale=0.5)
        compare(repeated, library, tensors(1), scale=0.25)
        compare(repeated, library, tensors(2), scale=0.5, starts=starts)
        compare(repeated, library, tensors(3), scale=0.5, starts=starts.clone())
        compare(repeated, library, [x[:3] for x in tensors(4)], scale=0.5)
        compare(repeated, library, wide, scale=0.5)
    # A tensor of options is told by which it is: the clone is another one each time.
    assert (library.calls, library.launches) == (7, 12)


def test_a_tensor_that_the_library_copies_is_another_layout():
    """It copies one whose place is not aligned to 16 bytes; a launch would read it as it lies."""
    library, repeated = Library(), Repeated()

    def copied(arguments):
        for place in range(3):
            if arguments[place].data_ptr() % 16:
                arguments[place] = arguments[place].clone()

    library.change = copied
    launched, kernel = [], library.kernel
    library.kernel = lambda *given: (launched.extend(given[:3]), kernel(*given))[1]
    for offset in (0, 0, 1, 1, 0):
        given = [torch.randn(41)[offset : offset + 40].view(5, 2, 4) for _ in range(3)]
        compare(repeated, library, given, scale=0.5)
    assert not any(one.data_ptr() % 16 for one in launched)
    assert library.calls == 3


def test_a_step_begins_anew():
    library, repeated = Library(), Repeated()
    for _ in range(2):
        compare(repeated, library, tensors(0), scale=0.5)
        repeated.forget()
    assert library.calls == 2


@pytest.mark.parametrize("change", [
    lambda arguments: True,  # two launches
    lambda arguments: arguments.__setitem__(0, arguments[0].clone()),
    lambda arguments: arguments.__setitem__(7, Aux(torch.ones(1))) or None,
    lambda arguments: arguments.__setitem__(6, torch.zeros(2)),
], ids=["launches", "a copy", "a tensor inside", "a tensor of its own"])  # fmt: skip
def test_what_cannot_be_made_again_is_called(change):
    library, repeated = Library(), Repeated()
    library.change = change
    library.kernel = lambda *arguments: None
    for number in range(3):
        repeated(library.function, *tensors(number), scale=0.5)
    assert library.calls == 3
