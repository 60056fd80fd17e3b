"""Host time of a segment's attention in one layer, by the number of its spans.

    python -m benchmarks.host_layers --spans 1 16 256

A wave in which every span has its own parent, so that both its calls have as many runs as it has
spans: forward and backward of `segment_attention`, including sidecar and merge. On the CPU kernel
`fa4` runs with a library that computes nothing, on tensors so small that only the host is measured,
in process time. With a GPU the kernels are real, and the time is that until all is launched.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import itertools
import pstats
import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_prefix.layers.blocks import operators
from megatron_prefix.layers.blocks.core import own_kernel_runs, segment_attention
from megatron_prefix.layers.blocks.kernels import KERNELS, Kernel, choose_kernel
from megatron_prefix.layers.segment import SegmentContext
from megatron_prefix.sidecar.cache import SidecarCache
from megatron_prefix.tree.payload_map import Form, Level, PayloadMap, RowMap, Run

HEADS, KV_HEADS, DIM = 2, 1, 8


class Idle:
    """flash-attn-4's two functions, which allocate what they return and compute nothing."""

    def _flash_attn_fwd(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Any, ...]:
        if q.ndim == 4:
            lse = q.new_zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        else:
            lse = q.new_zeros((q.shape[1], q.shape[0]), dtype=torch.float32)
        return torch.empty_like(q), lse, None

    def _flash_attn_bwd(
        self, q: Tensor, k: Tensor, v: Tensor, *more: Tensor, **options: Any
    ) -> tuple[Tensor, ...]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def wave(spans: int, rows: int, layers: int, device: str, new: int) -> Any:
    """Segment 1, whose spans see one span each of segment 0; and the queries of a layer.

    Every `new` gives other lengths: one span in every new + 2 is longer by one.
    """
    dtype = torch.bfloat16
    ends = [rows * n // spans for n in range(1, spans)]
    ends = [end + 1 if n % (new + 2) == 0 else end for n, end in enumerate(ends)]
    bounds = [0, *ends, rows + new]
    runs = [Run(a, b, a, b) for a, b in itertools.pairwise(bounds)]
    rows = bounds[-1]
    lengths = tuple(b - a for a, b in itertools.pairwise(bounds))
    planned = PayloadMap(
        RowMap(rows, (slice(0, rows), None), ((), (0,))), RowMap(1, (None, None), ((), ()), 1),
        ((), (Level(tuple(runs)),)), ((), ()), (lengths, lengths),
    )  # fmt: skip
    cache = SidecarCache(planned, [Form.POSITIONS] * layers)
    key = torch.zeros(rows, KV_HEADS, DIM, dtype=dtype, device=device)
    for layer in range(layers):
        cache.capture(layer, 0, (key, key))
    where = torch.zeros(rows, dtype=torch.int64, device=device)
    context = SegmentContext(1, False, own_kernel_runs(lengths, 0, 1), where, cache)
    query = torch.zeros(rows, 1, HEADS, DIM, dtype=dtype, device=device)
    return context, query


def run(context: SegmentContext, query: Tensor, layers: int, kernel: Kernel) -> None:
    """Every layer forward, then every layer backward."""
    query = query.requires_grad_()
    key, value = (query[:, :, :KV_HEADS].detach().requires_grad_() for _ in range(2))
    outs = [
        segment_attention(query, key, value, context, layer, 0.125, kernel)
        for layer in range(layers)
    ]
    for out in reversed(outs):
        out.backward(out.detach())


@contextlib.contextmanager
def kernel_of(device: str) -> Iterator[Kernel]:
    """The best kernel of a GPU; on the CPU `fa4` without its library."""
    if device == "cuda":
        yield choose_kernel("auto", device, torch.bfloat16, DIM, group=HEADS // KV_HEADS)
        return
    library = Idle()
    with mock.patch.object(operators, "flash_attn_4", return_value=library):
        yield KERNELS["fa4"]


def measured(spans: int, args: argparse.Namespace, device: str) -> float:
    """Seconds a layer, median of new segments."""
    times, clock = [], time.perf_counter if device == "cuda" else time.process_time
    with kernel_of(device) as kernel:
        for number in range(args.repeats + 2):
            # A segment of other lengths each time, as in training: nothing is known of it.
            context, query = wave(spans, args.rows, args.layers, device, number)
            if device == "cuda":
                torch.cuda.synchronize()
            begin = clock()
            run(context, query, args.layers, kernel)
            times.append((clock() - begin) / args.layers)
            if device == "cuda":
                torch.cuda.synchronize()
    return statistics.median(times[2:])


def main() -> None:
    """Prints milliseconds per segment and layer, one line per number of spans."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--spans", type=int, nargs="+", default=[1, 16, 256], help="(1 16 256)")
    parser.add_argument("--rows", type=int, default=1024, help="positions (default 1024)")
    parser.add_argument("--layers", type=int, default=32, help="(default 32)")
    parser.add_argument("--repeats", type=int, default=15, help="segments timed (default 15)")
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for spans in args.spans:
        with cProfile.Profile() if args.profile else contextlib.nullcontext() as profile:
            seconds = measured(spans, args, device)
        print(f"{spans} spans: {1e3 * seconds:.3f} ms a segment and layer")
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
