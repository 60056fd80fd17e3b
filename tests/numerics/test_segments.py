"""Attention of a tree's segments by blocks, cache and merge, against full causal attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_prefix.attention.core import SegmentContext, segment_attention
from megatron_prefix.attention.kernels import KERNELS
from megatron_prefix.numerics import assert_close
from megatron_prefix.plan.planner import backward_order
from megatron_prefix.sidecar.cache import SidecarCache
from megatron_prefix.tree import Forest, Pairs, TreeOptions, build
from tests.harness.trees import rollout_sets, tree_options

Results = dict[str, list[Tensor]]
NUM_LAYERS = 2


@dataclass(frozen=True)
class Heads:
    """Shape of one attention layer."""

    query: int = 4
    kv: int = 2
    dim: int = 8
    value_dim: int = 8

    @property
    def scale(self) -> float:
        return 0.7 * self.dim**-0.5


def random_tensors(forest: Forest, heads: Heads, dtype: torch.dtype) -> Results:
    """Per layer and segment q, k, v and the output's gradient; zero gradient for padding."""
    generator = torch.Generator().manual_seed(1)
    widths = {"q": (heads.query, heads.dim), "k": (heads.kv, heads.dim)}
    widths |= {"v": (heads.kv, heads.value_dim), "dout": (heads.query, heads.value_dim)}
    found: Results = {name: [] for name in widths}
    for _ in range(NUM_LAYERS):
        for segment in forest.segments:
            for name, shape in widths.items():
                x = torch.randn(
                    segment.padded_length, *shape, generator=generator, dtype=torch.float64
                )
                if name == "dout":
                    x[~not_padding(forest, segment)] = 0
                found[name].append(x.to(dtype))
    return found


def not_padding(forest: Forest, segment) -> Tensor:  # type: ignore[no-untyped-def]
    """Which positions of a segment are no padding, bool [padded_length]."""
    flags = [np.arange(span.padded) < span.length for span in segment.spans]
    return torch.from_numpy(np.concatenate(flags))


def by_segments(
    forest: Forest, given: Results, heads: Heads, kernel: str, *, recompute: bool = False
) -> Results:
    """Forwards in F-order, backwards in B-order, as the executor runs them."""
    cache = SidecarCache(forest.segments, NUM_LAYERS)
    leaves = {n: [x.clone().requires_grad_() for x in given[n]] for n in ("q", "k", "v")}
    outputs: list[Tensor] = []
    num = len(forest.segments)
    for index, segment in enumerate(forest.segments):
        context = SegmentContext(
            index,
            segment.inner,
            tuple(span.padded for span in segment.spans),
            cache.map.blocks[index],
            torch.zeros(0),
            cache,
        )
        for layer in range(NUM_LAYERS):
            tensors = [leaves[name][layer * num + index].unsqueeze(1) for name in leaves]
            call = (*tensors, context, layer, heads.scale, KERNELS[kernel])
            if recompute:
                outputs.append(checkpoint(segment_attention, *call, use_reentrant=False))
            else:
                outputs.append(segment_attention(*call))
    for index in backward_order(forest.segments):
        for layer in reversed(range(NUM_LAYERS)):
            gradient = given["dout"][layer * num + index].flatten(1).unsqueeze(1)
            outputs[index * NUM_LAYERS + layer].backward(gradient)
        if forest.segments[index].inner:
            cache.free(index, consumed=True)
    assert cache.num_bytes == 0
    by_layer = [outputs[i * NUM_LAYERS + layer] for layer in range(NUM_LAYERS) for i in range(num)]
    shape = (-1, heads.query, heads.value_dim)
    found = {"out": [x.detach().view(shape) for x in by_layer]}
    return found | {f"d{name}": [x.grad for x in leaves[name]] for name in leaves}


def by_full_attention(forest: Forest, given: Results, heads: Heads) -> Results:
    """Every rollout whole, in fp64; a span of several rollouts is taken from the first."""
    leaves = {n: [x.double().requires_grad_() for x in given[n]] for n in ("q", "k", "v")}
    num = len(forest.segments)
    outputs = [x.new_zeros(len(x), heads.query, heads.value_dim).double() for x in given["q"]]
    done: set[tuple[int, int]] = set()
    for path in forest.paths:
        for layer in range(NUM_LAYERS):
            q, k, v = (
                torch.cat([span_of(leaves[n][layer * num + i], forest, i, p) for i, p in path])
                for n in leaves
            )
            out = attention(q, k, v, heads)
            start = 0
            for i, p in path:
                span = forest.segments[i].spans[p]
                if (i, p) not in done:
                    first = sum(r.padded for r in forest.segments[i].spans[:p])
                    place = slice(first, first + span.length)
                    outputs[layer * num + i][place] = out[start : start + span.length].detach()
                    dout = given["dout"][layer * num + i][place].double()
                    out[start : start + span.length].backward(dout, retain_graph=True)
                start += span.length
        done.update(path)
    found = {"out": outputs}
    return found | {f"d{name}": [x.grad for x in leaves[name]] for name in leaves}


def span_of(x: Tensor, forest: Forest, index: int, number: int) -> Tensor:
    spans = forest.segments[index].spans
    start = sum(span.padded for span in spans[:number])
    return x[start : start + spans[number].length]


def attention(q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> Tensor:
    """Causal attention of one sequence with a mask, [positions, heads, value_dim]."""
    k, v = (x.repeat_interleave(heads.query // heads.kv, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * heads.scale
    hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def check(
    forest: Forest,
    heads: Heads,
    dtype: torch.dtype,
    kernel: str,
    *,
    recompute: bool = False,
) -> None:
    given = random_tensors(forest, heads, dtype)
    found = by_segments(forest, given, heads, kernel, recompute=recompute)
    wanted = by_full_attention(forest, given, heads)
    keep = torch.cat([not_padding(forest, segment) for segment in forest.segments] * NUM_LAYERS)
    flat = {n: torch.cat([x.flatten(1) for x in found[n]]).double()[keep] for n in found}
    expected = {n: torch.cat([x.flatten(1) for x in wanted[n]])[keep] for n in wanted}
    # dq and dk cancel where a row sees one key: they are judged beside dv, as in test_kernels.py.
    for names in (("out",), ("dv",), ("dq", "dv"), ("dk", "dv")):
        pair = (torch.cat([x[n].flatten() for n in names]) for x in (flat, expected))
        longest = max(max(forest.num_positions), heads.dim) * len(forest.paths)
        assert_close(*pair, longest, dtype, f"{names[0]} by {kernel}")


def forest_of(lengths: Sequence[tuple[int, int]], options: TreeOptions | None = None) -> Forest:
    """Rollouts that share the first positions with the one before: (shared, own) each."""
    draw = np.random.default_rng(0)
    rollouts: list[Pairs] = []
    tokens = np.zeros(0, np.int64)
    for shared, own in lengths:
        tokens = np.concatenate([tokens[:shared], draw.integers(0, 1000, own)])
        rollouts.append(Pairs(tokens, tokens, np.ones(len(tokens), bool)))
    return build(rollouts, None, options or TreeOptions(min_gain=0))


TREES = {
    "flat": forest_of([(0, 60), (40, 20), (40, 7), (40, 33)]),
    "three levels": forest_of([(0, 90), (70, 20), (40, 50), (60, 5), (20, 30), (40, 9)]),
    "chunks": forest_of([(0, 120), (100, 20), (100, 9)], TreeOptions(min_gain=0, chunk_tokens=13)),
    "chunks and levels": forest_of(
        [(0, 90), (70, 20), (40, 50), (60, 5)], TreeOptions(min_gain=0, chunk_tokens=16, align=8)
    ),
    "one rollout": forest_of([(0, 50)]),
    "small waves": forest_of([(0, 60), (40, 20), (40, 7)], TreeOptions(min_gain=0, segment_tokens=1)),
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("math", torch.float64),
        ("math", torch.float32),
        ("math", torch.bfloat16),
        ("flash_cpu", torch.float32),
        ("flash_cpu", torch.bfloat16),
    ],
)
def test_trees(tree: str, kernel: str, dtype: torch.dtype) -> None:
    check(TREES[tree], Heads(), dtype, kernel)


@pytest.mark.parametrize(
    "heads",
    [
        Heads(query=4, kv=4),
        Heads(query=6, kv=1),
        Heads(query=4, kv=4, dim=24, value_dim=16),  # multi-latent attention
        Heads(query=2, kv=2, dim=8, value_dim=20),
    ],
    ids=["a K/V head each", "one K/V head", "narrower values", "wider values"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_shapes_of_heads(heads: Heads, dtype: torch.dtype) -> None:
    check(TREES["chunks and levels"], heads, dtype, "math")


@pytest.mark.parametrize("tree", ["three levels", "chunks and levels"])
def test_recomputed_attention(tree: str) -> None:
    check(TREES[tree], Heads(), torch.float64, "math", recompute=True)


@settings(max_examples=60)
@given(sets=rollout_sets(), options=tree_options())
def test_random_trees(sets: tuple[list[Pairs], list[int]], options: TreeOptions) -> None:
    check(build(*sets, options), Heads(), torch.float64, "math")


def test_gradients_of_waves_add_up_in_fp32() -> None:
    """512 waves send a little over 1 each to one key; in bf16 the steps become 2 from 256 on."""
    rollouts = [Pairs(np.array([0, i]), np.array([0, i]), np.ones(2, bool)) for i in range(512)]
    forest = build(rollouts, None, TreeOptions(min_gain=0, segment_tokens=1))
    num = len(forest.segments)
    assert num == 513
    heads = Heads(query=1, kv=1, dim=2, value_dim=2)
    given = random_tensors(forest, heads, torch.bfloat16)
    for name in ("q", "k"):
        given[name] = [torch.zeros_like(x) for x in given[name]]  # so every key weighs one half
    given["dout"] = [torch.full_like(x, 2 * (1 + 2**-7)) for x in given["dout"]]
    given["dout"][0] = given["dout"][num] = torch.zeros(1, 1, 2, dtype=torch.bfloat16)
    found = by_segments(forest, given, heads, "math")
    expected = torch.full((1, 1, 2), 512 * (1 + 2**-7), dtype=torch.float64)
    assert torch.equal(found["dv"][0].double(), expected)
