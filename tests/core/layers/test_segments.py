"""Attention of a tree's segments by blocks, cache and merge, against full causal attention."""

import gc
import sys
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.host_layers import kernel_of, run, wave
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.lab.plans.forest import num_trees, trees
from megatron_prefix.layers.blocks.core import own_kernel_runs, segment_attention
from megatron_prefix.layers.blocks.kernels import KERNELS
from megatron_prefix.layers.segment import SegmentContext
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.sidecar.cache import SidecarCache
from megatron_prefix.tree import Pairs, TreeOptions, build
from megatron_prefix.tree.payload_map import Form, payload_map
from tests.harness.trees import rollout_sets, tree_options

NUM_LAYERS = 2


@dataclass(frozen=True)
class Heads:
    """Shape of one attention layer."""

    query: int = 4
    kv: int = 2
    dim: int = 8
    value_dim: int = 8

    @property
    def scale(self):
        return 0.7 * self.dim**-0.5


def random_tensors(forest, heads, dtype):
    """Per layer and segment q, k, v and the output's gradient; zero gradient for padding."""
    generator = torch.Generator().manual_seed(1)
    widths = {"q": (heads.query, heads.dim), "k": (heads.kv, heads.dim)}
    widths |= {"v": (heads.kv, heads.value_dim), "dout": (heads.query, heads.value_dim)}
    found = {name: [] for name in widths}
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


def not_padding(forest, segment):
    """Which positions of a segment are no padding, bool [padded_length]."""
    flags = [np.arange(span.padded) < span.length for span in segment.spans]
    return torch.from_numpy(np.concatenate(flags))


def planned(forest, parts=1, shares=None):
    """Where K/V lie when forwards and backwards run as one rank's plan has them."""
    return payload_map(forest.segments, make_plan(forest).actions_of(0, 0), parts, shares)


def by_segments(forest, given, heads, kernel, *, recompute=False, cache=None, place=(0, 1)):
    """Forwards and backwards as one rank's plan has them, which uses rows of the arena again.

    Args:
        forest: the segments.
        given: q, k, v and the output's gradient, of this rank's positions.
        heads: of the layer.
        kernel: its name.
        recompute: whether attention runs again in the backward.
        cache: the sidecar; default: on the device, of one rank.
        place: this context-parallel rank, and how many there are.
    """
    if cache is None:
        cache = SidecarCache(planned(forest), [Form.POSITIONS] * NUM_LAYERS)
    leaves = {n: [x.clone().requires_grad_() for x in given[n]] for n in ("q", "k", "v")}
    outputs = {}
    num = len(forest.segments)
    for kind, index in make_plan(forest).actions_of(0, 0):
        segment = forest.segments[index]
        if kind == "B":
            for layer in reversed(range(NUM_LAYERS)):
                gradient = given["dout"][layer * num + index].flatten(1).unsqueeze(1)
                outputs[layer, index].backward(gradient)
            if segment.inner:
                cache.free(index, consumed=True)
            continue
        context = context_of(index, segment, cache, place)
        for layer in range(NUM_LAYERS):
            tensors = [leaves[name][layer * num + index].unsqueeze(1) for name in leaves]
            call = (*tensors, context, layer, heads.scale, KERNELS[kernel])
            if recompute:
                outputs[layer, index] = checkpoint(segment_attention, *call, use_reentrant=False)
            else:
                outputs[layer, index] = segment_attention(*call)
    assert cache.device_bytes.held == 0
    places = [(layer, index) for layer in range(NUM_LAYERS) for index in range(num)]
    shape = (-1, heads.query, heads.value_dim)
    found = {"out": [outputs[place].detach().view(shape) for place in places]}
    return found | {f"d{name}": [x.grad for x in leaves[name]] for name in leaves}


def context_of(index, segment, cache, place=(0, 1)):
    runs = own_kernel_runs(cache.map.lengths[index], *place)
    return SegmentContext(index, segment.inner, runs, torch.zeros(0), cache)


def by_full_attention(forest, given, heads):
    """Every rollout whole, in fp64; a span of several rollouts is taken from the first."""
    leaves = {n: [x.double().requires_grad_() for x in given[n]] for n in ("q", "k", "v")}
    num = len(forest.segments)
    outputs = [x.new_zeros(len(x), heads.query, heads.value_dim).double() for x in given["q"]]
    done = set()
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


def span_of(x, forest, index, number):
    spans = forest.segments[index].spans
    start = sum(span.padded for span in spans[:number])
    return x[start : start + spans[number].length]


def attention(q, k, v, heads):
    """Causal attention of one sequence with a mask, [positions, heads, value_dim]."""
    k, v = (x.repeat_interleave(heads.query // heads.kv, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * heads.scale
    hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def check(forest, heads, dtype, kernel, **options):
    given = random_tensors(forest, heads, dtype)
    compare(
        forest, heads, dtype, kernel, given, by_segments(forest, given, heads, kernel, **options)
    )


def compare(forest, heads, dtype, kernel, given, found):
    """Against full attention, under the numerics policy."""
    wanted = by_full_attention(forest, given, heads)
    keep = torch.cat([not_padding(forest, segment) for segment in forest.segments] * NUM_LAYERS)
    flat = {n: torch.cat([x.flatten(1) for x in found[n]]).double()[keep] for n in found}
    expected = {n: torch.cat([x.flatten(1) for x in wanted[n]])[keep] for n in wanted}
    # dq and dk cancel where a row sees one key: they are judged beside dv, as in test_kernels.py.
    for names in (("out",), ("dv",), ("dq", "dv"), ("dk", "dv")):
        pair = (torch.cat([x[n].flatten() for n in names]) for x in (flat, expected))
        longest = max(max(forest.num_positions), heads.dim) * len(forest.paths)
        assert_close(*pair, longest, dtype, f"{names[0]} by {kernel}")


def forest_of(lengths, options=None):
    """Rollouts that share the first positions with the one before: (shared, own) each.

    One that shares nothing begins a tree.
    """
    draw = np.random.default_rng(0)
    rollouts = []
    tokens = np.zeros(0, np.int64)
    for shared, own in lengths:
        tokens = np.concatenate([tokens[:shared], draw.integers(0, 1000, own)])
        rollouts.append(Pairs(tokens, tokens, np.ones(len(tokens), bool)))
    return build(rollouts, None, options or TreeOptions(min_gain=0))


# Trees of one, two, three and four levels.
MANY = [
    (0, 40), (30, 9), (30, 12), (34, 5),
    (0, 17), (12, 5), (12, 8),
    (0, 11),
    (0, 50), (41, 9), (33, 20), (45, 4), (20, 8), (20, 3), (23, 9),
    (0, 25), (16, 3), (16, 6), (16, 14),
]  # fmt: skip
PACKED = {
    "a segment a level": forest_of(MANY),
    "aligned": forest_of(MANY, TreeOptions(min_gain=0, multiple=4)),
    "several bundles": forest_of(
        [*MANY, *MANY, *MANY], TreeOptions(min_gain=0, multiple=4, segment_tokens=64)
    ),
    "large and small": forest_of(
        [(0, 180), (150, 30), (160, 9), (90, 40), (100, 7), *MANY],
        TreeOptions(min_gain=0, multiple=4, segment_tokens=40, chunk_tokens=24),
    ),
}
by_every_kernel = pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("math", torch.float64), ("math", torch.bfloat16), ("flash_cpu", torch.float32)],
)


def test_the_forests_have_what_they_are_for():
    """Else an equal result proves nothing."""
    for name, forest in PACKED.items():
        assert num_trees(forest.segments) >= 5
        assert any(len({*numbers}) > 1 for numbers in trees(forest.segments))
        mixed = {}
        for path in forest.paths:
            mixed.setdefault(path[-1].segment, set()).add(len(path))
        assert max(map(len, mixed.values())) > 1, "no wave has leaves of several depths"
        assert max(len(segment.parents) for segment in forest.segments if not segment.inner) > 1
        assert ways(forest) == BOTH_WAYS or name == "large and small"
        levels = [level for of in planned(forest).levels for level in of]
        assert {len(level.runs) > 1 for level in levels} == {False, True}
    for name in ("several bundles", "large and small"):
        again = planned(PACKED[name]).positions
        assert again.length < sum(rows.stop - rows.start for rows in again.intervals if rows)


def ways(forest):
    """How keys are read: neighbours in the arena as a view, others by an index."""
    levels = (level for of in planned(forest).levels for level in of)
    return {Tensor if level.rows is None else slice for level in levels}


class Watched(SidecarCache):
    """Notes in which ways keys are read and queries taken."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.keys = set()
        self.queries = set()

    def level(self, index, number):
        found = super().level(index, number)
        self.keys.add(type(found.rows))
        self.queries.add(type(found.queries))
        return found


BOTH_WAYS = {slice, Tensor}


@pytest.mark.parametrize("name", PACKED)
@by_every_kernel
def test_many_trees(name, kernel, dtype):
    forest = PACKED[name]
    for recompute in (False, True) if dtype == torch.float64 else (False,):
        cache = Watched(planned(forest), [Form.POSITIONS] * NUM_LAYERS)
        check(forest, Heads(), dtype, kernel, recompute=recompute, cache=cache)
        assert cache.keys == ways(forest) and slice in cache.queries


@settings(max_examples=60)
@given(sets=rollout_sets(), options=tree_options())
def test_random_trees(sets, options):
    check(build(*sets, options), Heads(), torch.float64, "math")


def test_gradients_of_waves_add_up_in_fp32():
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


# What the host does for a segment's attention in a layer does not grow with its spans -------------


def calls(spans, layers):
    """Calls of Python and of C functions in the layers' forwards and backwards of a segment."""
    found = Counter()

    def count(frame, event, argument):
        found[event] += event in ("call", "c_call")

    context, query = wave(spans, 4 * spans, layers, "cpu", spans)
    with kernel_of("cpu") as kernel:
        gc.disable()  # what others left would be counted
        sys.setprofile(count)
        try:
            run(context, query, layers, kernel)
        finally:
            sys.setprofile(None)
            gc.enable()
    return found.total()


def test_no_call_a_span_in_the_layer_loop():
    """What is made from the lengths is made in a segment's first layer."""
    spans = 17
    calls(1, 1)  # imports

    def a_layer(spans):
        return calls(spans, 3) - calls(spans, 2)

    for num in (1, 2, spans):
        a_layer(num)
    many = a_layer(spans)
    assert 100 < many <= a_layer(1) + 50  # a lone run is another kind of call
    assert many == a_layer(2)
