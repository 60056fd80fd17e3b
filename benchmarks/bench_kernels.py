"""Times the attention of a shared prefix and its waves, by kernel, on one device.

    python benchmarks/bench_kernels.py                       # every kernel that works on the GPU
    python benchmarks/bench_kernels.py --shapes 8x10240x2048 --kernels cudnn,flash --json out.json
    python benchmarks/bench_kernels.py --shapes 8x10240x2048 --kernels fa4,flash --runs 60x137

A shape is rollouts x prefix tokens x response tokens. For each it times the prefix's own causal
block, the wave's dense block against the prefix, its causal block and the merge, forward and
backward, with rollouts of equal and of unequal lengths (same sum). "first" is what the first pass
over new shapes took beyond later ones: cuDNN builds an execution plan for each on the host. The
second table is that cost alone, for single dense blocks of sizes never used before.

The last table has runs of queries side by side, each with its own keys: NUMxQUERIESxKEYS, where
LOW-HIGH spreads lengths evenly; NUMxLENGTH is causal. Each is timed as one call of the kernel, and
as one call per run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_prefix.lab.numerics.working_kernels import available
from megatron_prefix.layers.blocks.interface import Kernel, Partial, Runs
from megatron_prefix.layers.blocks.kernels import choose_kernel
from megatron_prefix.layers.blocks.merge import merge

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DEFAULT_RUNS = (
    "1x2048x10240,1x8192x10240,1x8192x16384,15x548x101,10x700x1800-3000,3x2300-2500x5000,60x137x120,"
    "1x10240,4x2048,60x137,16x300-700"
)
DEFAULT_SHAPES = "8x10240x2048,9x16384x64,28x4096x2048,28x16384x2048,16x32768x2048"
STEPS = (
    "prefix_forward", "prefix_backward", "dense_forward", "dense_backward",
    "causal_forward", "causal_backward", "merge",
)  # fmt: skip


class Shape(NamedTuple):
    """One group: ``num`` rollouts of ``response`` tokens behind ``prefix`` tokens."""

    num: int
    prefix: int
    response: int

    @property
    def rows(self) -> int:
        """Query rows of the wave that holds every rollout."""
        return self.num * self.response

    def lengths(self, equal: bool) -> tuple[int, ...]:
        """Rows of each rollout; unequal ones lie between half and one and a half of equal ones."""
        if equal or self.response < 4:
            return (self.response,) * self.num
        source = random.Random(0)
        lengths = [self.response] * self.num
        for i in range(0, self.num - 1, 2):
            shift = source.randint(1, self.response // 2)
            lengths[i], lengths[i + 1] = lengths[i] - shift, lengths[i + 1] + shift
        return tuple(lengths)


class Device:
    """Makes tensors and measures time on one device."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.name, self.repeats = options.device, options.repeats
        self.dtype = DTYPES[options.dtype]
        self.heads, self.kv_heads, self.dim = options.heads, options.kv_heads, options.dim
        self.generator = torch.Generator(self.name).manual_seed(0)

    def kernel(self, name: str) -> Kernel:
        """The kernel for these heads."""
        group = self.heads // self.kv_heads
        return choose_kernel(name, self.name, self.dtype, self.dim, group=group)

    def rows(self, num: int, heads: int) -> Tensor:
        """[num, heads, dim], normally distributed."""
        shape = (num, heads, self.dim)
        wide = torch.randn(shape, generator=self.generator, device=self.name, dtype=torch.float32)
        return wide.to(self.dtype)

    def wait(self) -> None:
        """Returns when the device has done everything it was given."""
        if self.name != "cpu":
            torch.cuda.synchronize()

    def wall_ms(self, run: Callable[[], Any]) -> float:
        """Milliseconds until ``run`` has been issued and done."""
        self.wait()
        start = time.perf_counter()
        run()
        self.wait()
        return 1e3 * (time.perf_counter() - start)

    def median_ms(self, run: Callable[[], Any]) -> float:
        """Median over the repeats, after one to warm up."""
        run()
        return statistics.median(self.wall_ms(run) for _ in range(self.repeats))


def group_steps(
    device: Device, kernel: Kernel, shape: Shape, lengths: tuple[int, ...]
) -> dict[str, Callable[[], Any]]:
    """The blocks of a group as calls, by name, in an order in which each can run."""
    q, dout = (device.rows(shape.rows, device.heads) for _ in range(2))
    own_k, own_v = (device.rows(shape.rows, device.kv_heads) for _ in range(2))
    prefix_q, prefix_dout = (device.rows(shape.prefix, device.heads) for _ in range(2))
    k, v = (device.rows(shape.prefix, device.kv_heads) for _ in range(2))
    scale, kept = device.dim**-0.5, dict[str, Any]()
    above = Runs.dense(shape.rows, shape.prefix)
    whole, own = Runs.own((shape.prefix,)), Runs.own(lengths)

    backward: Callable[..., Any] = kernel.backward

    def keep(name: str, value: Any) -> None:
        kept[name] = value

    return {
        "prefix_forward": lambda: keep("prefix", kernel.forward(prefix_q, k, v, whole, scale)),
        "prefix_backward": lambda: backward(
            prefix_dout, prefix_q, k, v, *kept["prefix"], whole, scale
        ),
        "dense_forward": lambda: keep("dense", kernel.forward(q, k, v, above, scale)),
        "causal_forward": lambda: keep("own", kernel.forward(q, own_k, own_v, own, scale)),
        "merge": lambda: keep("merged", merge([kept["own"], kept["dense"]])),
        "dense_backward": lambda: backward(
            dout, q, k, v, *kept["merged"], kept["dense"].aux, above, scale
        ),
        "causal_backward": lambda: backward(
            dout, q, own_k, own_v, *kept["merged"], kept["own"].aux, own, scale
        ),
    }


def group_flops(device: Device, shape: Shape, lengths: tuple[int, ...]) -> float:
    """Multiply-adds times two of all blocks, forward (2 products) and backward (5 products)."""
    pairs = shape.prefix**2 / 2 + shape.rows * shape.prefix + sum(n * n for n in lengths) / 2
    return 7 * 2 * pairs * device.heads * device.dim


def time_group(device: Device, name: str, shape: Shape, equal: bool) -> dict[str, Any]:
    """Steady milliseconds of every step, their sum, TFLOP/s, and the first pass's surplus."""
    kernel = device.kernel(name)
    lengths = shape.lengths(equal)
    steps = group_steps(device, kernel, shape, lengths)
    first = sum(device.wall_ms(run) for run in steps.values())
    steady = {step: device.median_ms(run) for step, run in steps.items()}
    total = sum(steady.values())
    rate = group_flops(device, shape, lengths) / total / 1e9
    return {
        "kernel": name, "shape": "x".join(map(str, shape)), "equal": equal,
        **{f"{step}_ms": steady[step] for step in STEPS},
        "total_ms": total, "tflops": rate, "first_ms": first - total,
    }  # fmt: skip


def time_new_shapes(device: Device, name: str, shape: Shape, num: int) -> dict[str, Any]:
    """Median cost of a dense block's first call at sizes never used before, beyond a second."""
    kernel = device.kernel(name)
    scale, surplus = device.dim**-0.5, []
    for i in range(num):
        rows, keys = shape.rows + 24 * i + 8, shape.prefix + 40 * i + 8
        q, dout = (device.rows(rows, device.heads) for _ in range(2))
        k, v = (device.rows(keys, device.kv_heads) for _ in range(2))
        of = Runs.dense(rows, keys)
        forward = partial(kernel.forward, q, k, v, of, scale)
        forward_ms = device.wall_ms(forward) - device.wall_ms(forward)
        backward = partial(kernel.backward, dout, q, k, v, *forward(), of, scale)
        backward_ms = device.wall_ms(backward) - device.wall_ms(backward)
        surplus.append((forward_ms, backward_ms))
    forwards, backwards = zip(*surplus, strict=True)
    return {
        "kernel": name,
        "new_shape_forward_ms": statistics.median(forwards),
        "new_shape_backward_ms": statistics.median(backwards),
    }


def time_runs(device: Device, name: str, text: str, runs: Runs, calls: bool) -> dict[str, Any]:
    """Median milliseconds of a block, as one call of the kernel or as a call for each run."""
    kernel, scale = device.kernel(name), device.dim**-0.5
    q, dout = (device.rows(sum(runs.queries), device.heads) for _ in range(2))
    k, v = (device.rows(sum(runs.keys), device.kv_heads) for _ in range(2))
    pieces = [((dout, q, k, v), runs)]
    if calls:
        dealt = zip(
            *(x.split(runs.queries) for x in (dout, q)), *(x.split(runs.keys) for x in (k, v)),
            strict=True,
        )  # fmt: skip
        each = zip(runs.queries, runs.keys, strict=True)
        pieces = [
            (tensors, Runs((queries,), (keys,), runs.causal))
            for tensors, (queries, keys) in zip(dealt, each, strict=True)
        ]

    def forward() -> list[Partial]:
        return [kernel.forward(*tensors[1:], of, scale) for tensors, of in pieces]

    def backward() -> None:
        for (tensors, of), part in zip(pieces, kept, strict=True):
            kernel.backward(*tensors, *part, of, scale)

    kept = forward()
    forward_ms, backward_ms = device.median_ms(forward), device.median_ms(backward)
    pairs = sum(a * b for a, b in zip(runs.queries, runs.keys, strict=True))
    flops = 7 * 2 * pairs * device.heads * device.dim / (2 if runs.causal else 1)
    return {
        "kernel": name, "shape": text, "calls": len(pieces), "forward_ms": forward_ms,
        "backward_ms": backward_ms, "tflops": flops / (forward_ms + backward_ms) / 1e9,
    }  # fmt: skip


def measure_runs(
    device: Device, names: list[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Every kernel on every list of runs."""
    rows = []
    for text, runs in options.runs:
        distinct = len(set(zip(runs.queries, runs.keys, strict=True)))
        for name in names:
            if "cudnn" in name.split("+") and distinct > options.unequal_up_to:
                continue
            ways = (False, True) if len(runs.queries) > 1 and "+" not in name else (False,)
            rows += [time_runs(device, name, text, runs, calls) for calls in ways]
    return rows


def show(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    """One row per measurement; milliseconds with three digits, of which the last may be noise."""
    if not rows:
        return
    table = Table(title=title)
    for column in rows[0]:
        name = column.removesuffix("_ms").replace("_", " ")
        table.add_column(name, justify="left" if column in ("kernel", "shape") else "right")
    for row in rows:
        table.add_row(*(f"{x:.3g}" if isinstance(x, float) else str(x) for x in row.values()))
    console.print(table)


def parse_shapes(text: str) -> list[Shape]:
    """ "8x10240x2048,..." as shapes; argparse.ArgumentTypeError for anything else."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", part.strip())
        if match is None:
            raise argparse.ArgumentTypeError(f"{part!r} is not ROLLOUTSxPREFIXxRESPONSE")
        found.append(Shape(*map(int, match.groups())))
    return found


def spread(text: str, num: int) -> tuple[int, ...]:
    """ "700" as num equal lengths, "500-900" as num lengths from the first to the last."""
    low, high = (int(x) for x in (text.split("-") * 2)[:2])
    return tuple(low + (high - low) * i // max(num - 1, 1) for i in range(num))


def parse_runs(text: str) -> list[tuple[str, Runs]]:
    """ "15x548x101,60x137,..." as runs; argparse.ArgumentTypeError for anything else."""
    found = []
    for part in text.split(","):
        length = r"[1-9]\d*(?:-[1-9]\d*)?"
        match = re.fullmatch(rf"([1-9]\d*)x({length})(?:x({length}))?", part.strip())
        if match is None:
            raise argparse.ArgumentTypeError(f"{part!r} is not NUMxQUERIESxKEYS or NUMxLENGTH")
        queries = spread(match[2], int(match[1]))
        keys = spread(match[3], int(match[1])) if match[3] else None
        found.append((part, Runs(queries, keys) if keys else Runs.own(queries)))
    return found


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shapes", type=parse_shapes, default=parse_shapes(DEFAULT_SHAPES))
    parser.add_argument("--runs", type=parse_runs, default=parse_runs(DEFAULT_RUNS))
    parser.add_argument("--kernels", help="names by comma; default: every one that works")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-shapes", type=int, default=3, help="sizes in the last table")
    parser.add_argument(
        "--unequal-up-to", type=int, default=9,
        help="rollouts above which cuDNN is not run on unequal lengths: two plans for each",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    return parser.parse_args()


def kernel_names(options: argparse.Namespace, console: Console) -> list[str]:
    """Those asked for, or all fast ones that work here, the two CUDA kernels mixed included."""
    if options.kernels:
        return options.kernels.split(",")
    group = options.heads // options.kv_heads
    reasons = available(options.device, DTYPES[options.dtype], options.dim, group=group)
    for name, reason in reasons.items():
        console.print(f"{name}: {reason or 'works'}", highlight=False)
    names = [name for name, reason in reasons.items() if reason is None and name != "math"]
    return [*names, "cudnn+flash"] if {"cudnn", "flash"} <= set(names) else names or ["math"]


def measure(device: Device, names: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every kernel on every shape, equal lengths and unequal ones."""
    rows: list[dict[str, Any]] = []
    small = Shape(2, 64, 64)
    for run in group_steps(
        device,
        device.kernel("math"),
        small,
        small.lengths(equal=True),
    ).values():
        run()  # compiles the merge, which is no kernel's first call
    for shape in options.shapes:
        for equal in (True, False):
            for name in names:
                loops = name.split("+")[-1] == "cudnn"
                if equal or not loops or shape.num <= options.unequal_up_to:
                    rows.append(time_group(device, name, shape, equal))
    return rows


def main() -> None:
    """Measures, prints the tables and writes the JSON file."""
    options, console = parse_arguments(), Console(width=180)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: give --device cpu to try the script")
    device = Device(options)
    versions = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "cudnn": torch.backends.cudnn.version() if options.device == "cuda" else None,
        "avoid_recompile": os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE"),
    }
    console.print(versions)
    names = kernel_names(options, console)
    groups = measure(device, names, options)
    single = [name for name in names if "+" not in name]
    new = [time_new_shapes(device, name, options.shapes[0], options.new_shapes) for name in single]
    show(console, "attention of one group, forward and backward, ms", groups)
    runs = measure_runs(device, names, options)
    show(console, "surplus of a dense block's first call at a new size, ms", new)
    show(console, "runs side by side, ms", runs)
    if options.json:
        report = {"versions": versions, "groups": groups, "new_shapes": new, "runs": runs}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
