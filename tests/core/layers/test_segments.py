"""Attention of segments: sums in fp32, and what the host does. Rows of tests/test_cases.py prove
that it is full causal attention."""

import gc
import sys
from collections import Counter

import numpy as np
import torch

from benchmarks.host_layers import kernel_of, run, wave
from megatron_prefix.layers.blocks.core import own_kernel_runs, segment_attention
from megatron_prefix.layers.blocks.kernels import KERNELS
from megatron_prefix.layers.segment import SegmentContext
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.sidecar.cache import SidecarCache
from megatron_prefix.tree import Pairs, TreeOptions, build
from megatron_prefix.tree.payload_map import Form, payload_map


def test_gradients_of_waves_add_up_in_fp32():
    """512 waves send a little over 1 each to one key; in bf16 the steps become 2 from 256 on."""
    rollouts = [Pairs(np.array([0, i]), np.array([0, i]), np.ones(2, bool)) for i in range(512)]
    forest = build(rollouts, None, TreeOptions(min_gain=0, segment_tokens=1))
    assert len(forest.segments) == 513
    actions = make_plan(forest).actions_of(0, 0)
    cache = SidecarCache(payload_map(forest.segments, actions), [Form.POSITIONS])
    options = {"dtype": torch.bfloat16, "requires_grad": True}
    given = [  # all zeros, so every key weighs one half
        [torch.zeros(segment.padded_length, 1, 1, 2, **options) for _ in "qkv"]
        for segment in forest.segments
    ]
    outputs = {}
    for kind, index in actions:
        segment = forest.segments[index]
        if kind == "F":
            runs = own_kernel_runs(cache.map.lengths[index], 0, 1)
            context = SegmentContext(index, segment.inner, runs, torch.zeros(0), cache)
            call = (*given[index], context, 0, 1.0, KERNELS["math"])
            outputs[index] = segment_attention(*call)
            continue
        sent = 0.0 if segment.inner else 2 * (1 + 2**-7)
        outputs[index].backward(torch.full_like(outputs[index], sent))
        if segment.inner:
            cache.free(index, consumed=True)
    found = given[0][-1].grad
    assert found.double().flatten().tolist() == [512 * (1 + 2**-7)] * 2


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
