"""A wave below its ancestors: random tensors, attention with a mask, and the same by blocks."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_prefix.lab.numerics import accumulator_dtype, assert_close
from megatron_prefix.layers.blocks.interface import Runs
from megatron_prefix.layers.blocks.merge import merge

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
LAYOUTS = ("contiguous", "qkv", "heads_first", "buffer")


@dataclass(frozen=True)
class Case:
    """A wave of spans of `lengths` below ancestors with these numbers of keys."""

    ancestors: tuple[int, ...]
    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    dim_v: int = 16

    @property
    def scale(self):
        return self.dim**-0.5

    @property
    def reduction_length(self):
        """Terms of the longest sum: keys of a query, queries of a key, or the width of a head."""
        queries = sum(self.lengths)
        group = self.heads // self.kv_heads
        return max(sum(self.ancestors) + max(self.lengths), queries * group, self.dim)


class Tensors(NamedTuple):
    """[positions, heads, width]; ``keys[i]`` and ``values[i]`` of ancestor i, the last its own."""

    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    dout: Tensor


CASES = {
    "one span, no ancestor": Case((), (37,)), "one token": Case((), (1,)),
    "one token below one token": Case((1,), (1,)),
    "single tokens below a prefix": Case((23,), (1, 1, 1)),
    "equal rollouts": Case((19,), (12, 12, 12)), "uneven rollouts": Case((40,), (7, 1, 13, 13, 2)),
    "three ancestors": Case((11, 1, 30), (6, 9)),
    "no sharing of heads": Case((15,), (8, 8, 3), heads=3, kv_heads=3),
    "one K/V head": Case((15,), (8, 3, 3), heads=6, kv_heads=1),
    "long enough for several tiles": Case((700,), (230, 70), heads=2, kv_heads=1),
}  # fmt: skip
NARROW = Case((21, 5), (9, 9, 4), dim=24, dim_v=16)


def on_cuda(x):
    """What kernels ask of a tensor before they take it, as if it were on CUDA."""
    return SimpleNamespace(
        device=torch.device("cuda"), dtype=x.dtype, shape=x.shape,
        stride=x.stride, data_ptr=lambda: 0,
    )  # fmt: skip


def make(case, dtype, layout="contiguous", device="cpu", seed=0):
    """Random tensors in the memory layouts in which Megatron and the cache hold them."""
    generator = torch.Generator().manual_seed(seed)
    length, widths = sum(case.lengths), (case.dim, case.dim_v)

    def rand(num, heads, width):
        x = torch.randn(num, heads, width, generator=generator, dtype=torch.float64)
        x = x.to(device, dtype)
        if layout == "heads_first":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        if layout == "buffer":
            larger = torch.full((num + 5, heads, width), float("nan"), dtype=dtype, device=device)
            larger[3 : 3 + num] = x
            return larger[3 : 3 + num]
        return x

    q = rand(length, case.heads, case.dim)
    counts = (*case.ancestors, length)
    keys = [rand(num, case.kv_heads, widths[0]) for num in counts]
    values = [rand(num, case.kv_heads, widths[1]) for num in counts]
    if layout == "qkv":  # Megatron's fused projection, [positions, 1, all heads, width]
        mixed = torch.cat([q, keys[-1], values[-1]], 1).unsqueeze(1)
        split = (case.heads, case.kv_heads, case.kv_heads)
        q, keys[-1], values[-1] = (x.squeeze(1) for x in mixed.split(split, dim=2))
    return Tensors(q, keys, values, rand(length, case.heads, case.dim_v))


def wave_mask(case):
    """[queries, keys], True where a query sees a key: ancestors, earlier ones of its span."""
    num = sum(case.lengths)
    own = torch.zeros(num, num, dtype=torch.bool)
    start = 0
    for length in case.lengths:
        own[start : start + length, start : start + length] = torch.ones(length, length).tril() > 0
        start += length
    return torch.cat([torch.ones(num, sum(case.ancestors), dtype=torch.bool), own], 1)


def expected(case, tensors):
    """Full attention with a mask, by autograd in fp64."""
    q, *rest = (
        x.double().detach().requires_grad_() for x in (tensors.q, *tensors.keys, *tensors.values)
    )
    keys, values = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    group = case.heads // case.kv_heads
    k, v = (torch.cat(x).repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * case.scale
    scores = scores.masked_fill(~wave_mask(case).to(q.device), float("-inf"))
    out = (scores.softmax(-1) @ v).transpose(0, 1)
    out.backward(tensors.dout.double())
    result = {"out": out.detach(), "lse": scores.logsumexp(-1).detach(), "dq": q.grad}
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        result |= {f"dk{i}": key.grad, f"dv{i}": value.grad}
    return result


def by_blocks(kernel, case, tensors):
    """A dense block for each ancestor and one causal block, merged, and their backwards."""
    q, keys, values, dout = tensors
    pairs = list(zip(keys, values, strict=True))
    runs = [*(Runs.dense(len(q), n) for n in case.ancestors), Runs.own(case.lengths)]
    blocks = list(zip(pairs, runs, strict=True))
    parts = [kernel.forward(q, k, v, of, case.scale) for (k, v), of in blocks]
    out, lse = merge(parts)
    grads = [
        kernel.backward(dout, q, k, v, out, lse, part.aux, of, case.scale)
        for ((k, v), of), part in zip(blocks, parts, strict=True)
    ]
    dq = grads[0][0]
    for more, _, _ in grads[1:]:
        dq.add_(more)  # in place, as the caller does
    result = {"out": out, "lse": lse, "dq": dq}
    for i, (_, dk, dv) in enumerate(grads):
        result |= {f"dk{i}": dk, f"dv{i}": dv}
    return result


def check(kernel, case, dtype, layout="contiguous", device="cpu"):
    """Blocks and merge of ``kernel`` against `expected`, every result under the policy."""
    tensors = make(case, dtype, layout, device)
    got, wanted = by_blocks(kernel, case, tensors), expected(case, tensors)
    assert got.keys() == wanted.keys()
    for name in wanted:
        what = f"{kernel.name} {name} of {case}"
        assert got[name].dtype == (accumulator_dtype(dtype) if name == "lse" else dtype), what
        actual, value = got[name], wanted[name]
        if name.startswith(("dq", "dk")):
            # dq and dk are differences that cancel, completely where a query sees one key. Rounding
            # errors are those of their terms, so they are compared together with dv.
            beside = [name, *(other for other in wanted if other.startswith("dv"))]
            actual, value = (
                torch.cat([x[other].flatten() for other in beside]) for x in (got, wanted)
            )
        assert_close(actual, value, case.reduction_length, dtype, what)
