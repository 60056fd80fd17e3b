"""Attention alone, forward and backward: this package and other ways to run a group's attention.

    python -m benchmarks.peers --json peers.json             # DualKV's shapes, on a GPU
    python -m benchmarks.peers --peers ours,dense-fa4,flex --shapes 28x4096x2048
    python -m benchmarks.peers --device cpu --dtype float32 --heads 4 --kv-heads 2 --dim 16 \\
        --shapes 3x48x16 --check-shape 3x48x16               # tries the script

A shape is rollouts x prompt x answer; heads are those of DualKV's table 1. The peers:

    ours             the prompt, then waves of --segment-tokens, by layers/blocks/core.py
    dense-KERNEL     N copies: every rollout whole, some per call; the fastest one is the baseline
    flex, flex-fa4   the packed graph by FlexAttention, with its own kernel or its experimental one
    repeated-KERNEL  the prompt once; each answer reads a copy of its K/V, and its own
    grouper-KERNEL   the package prefix-grouper (MIT licence), with this kernel as its attention

KERNEL is a kernel of this package (layers/blocks/operators.py).
First, on a small shape, ours is compared with the exact formulas in fp64, and the others with ours.
Then each is timed: --warm-up calls, and medians of --repeats. Peaks count inputs and what a forward
of the whole group leaves for its backward. Block masks are made beforehand. The exit code is 1 if a
peer differs or ours could not run; a peer that cannot run here says why, and the others go on.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_kernels import DTYPES, Device, Shape, parse_shapes
from benchmarks.peers_attention import Copies, Inputs, Ours, Peer, Results, pairs
from benchmarks.peers_flex import BACKENDS, packed_attention
from benchmarks.peers_graphs import Graph, causal_by, grouper, repeated
from megatron_prefix.errors import UserError
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.layers.blocks.kernels import KERNELS

DUALKV = "28x4096x2048,28x16384x2048,16x32768x2048"
PEERS = {
    "cuda": "ours,dense-fa4,dense-cudnn,dense-flash,flex,repeated-fa4,repeated-flash,grouper-flash",
    "cpu": "ours,dense-flash_cpu,dense-math,flex,repeated-flash_cpu,grouper-flash_cpu",
}
OURS = "ours"
GIB = float(1 << 30)


@dataclass
class Row:
    """One peer at one shape; times are None if it failed, and `reason` says why."""

    shape: str
    peer: str
    forward_ms: float | None = None
    backward_ms: float | None = None
    total_ms: float | None = None
    gib: float | None = None
    tflops: float | None = None
    times_ours: float | None = None
    reason: str | None = None

    def line(self) -> str:
        """The row as it is printed."""
        start = f"{self.shape:>14}  {self.peer:<16}"
        if self.total_ms is None:
            return f"{start}  {self.reason}"
        ratio = "" if self.times_ours is None else f"  {self.times_ours:5.2f}x ours"
        return (
            f"{start}  forward {self.forward_ms:8.2f}  backward {self.backward_ms:8.2f}  total"
            f" {self.total_ms:8.2f} ms  {self.gib:6.1f} GiB  {self.tflops:5.0f} TFLOP/s{ratio}"
        )


def make(name: str, inputs: Inputs, device: Device, options: argparse.Namespace) -> Peer:
    """The peer called ``name``.

    Raises:
        UserError: there is none, or its kernel does not work here.
        ImportError: its package is not there.
    """
    kind, _, kernel = name.partition("-")
    if name == OURS:
        return Ours(inputs, device.kernel(options.kernel), options.segment_tokens)
    if kind == "dense" and kernel in KERNELS:
        return Copies(inputs, device.kernel(kernel), options.dense_tokens)
    if kind == "flex" and (kernel or BACKENDS[0]) in BACKENDS:
        shape = inputs.shape
        packed = packed_attention(
            shape.prefix, (shape.response,) * shape.num, 1, inputs.q.device, kernel or BACKENDS[0],
            options.flex_mode,
        )  # fmt: skip
        scale = inputs.scale
        return Graph(inputs, (len(inputs.q),), lambda q, k, v: [packed(q[0], k[0], v[0], scale)])
    if kind in ("repeated", "grouper") and kernel in KERNELS:
        causal = causal_by(device.kernel(kernel), inputs.scale)
        return (repeated if kind == "repeated" else grouper)(inputs, causal)
    raise UserError(f"peer {name!r}: give some of those in --help")


def inputs_of(device: Device, shape: Shape) -> Inputs:
    """A packed group of random tensors."""
    positions = shape.prefix + shape.rows
    q, dout = (device.rows(positions, device.heads) for _ in range(2))
    k, v = (device.rows(positions, device.kv_heads) for _ in range(2))
    return Inputs(shape, q, k, v, dout)


def results_of(peer: Peer) -> Results:
    """What a peer computes."""
    peer.forward()
    peer.backward()
    return peer.results()


def compared(found: Results, expected: Results, inputs: Inputs, device: Device) -> str | None:
    """Where two results differ by more than the numerics policy allows; None if nowhere."""
    shape, group = inputs.shape, device.heads // device.kv_heads
    terms = max((shape.prefix + shape.rows) * group, device.dim)
    try:
        for name, got, wanted in zip(Results._fields, found, expected, strict=True):
            assert_close(got, wanted, terms, inputs.q.dtype, name)
    except AssertionError as difference:
        return f"DIFFERS: {difference}"
    return None


def checked(device: Device, options: argparse.Namespace) -> dict[str, str | None]:
    """What is wrong with each peer: it differs, or why it cannot run; None if nothing."""
    inputs = inputs_of(device, options.check_shape)
    exact = results_of(Copies(inputs.double(), KERNELS["math"], options.dense_tokens))
    reasons: dict[str, str | None] = {}
    ours = None
    for name in dict.fromkeys((OURS, *options.peers)):
        try:
            found = results_of(make(name, inputs, device, options))
            expected = exact if ours is None else ours
            reasons[name] = compared(found, expected, inputs, device)
            ours = found if name == OURS else ours
        except Exception as error:  # noqa: BLE001 - a peer may throw anything; the others go on
            reasons[name] = reason_of(error)
        free(device)
        print(f"{name:<16}  {reasons[name] or 'agrees'}", flush=True)
    return reasons


def timed(peer: Peer, device: Device, options: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds, and the peak of allocated memory in GiB (0 on the CPU)."""
    for _ in range(options.warm_up):
        peer.forward()
        peer.backward()
    device.wait()
    on_gpu = device.name != "cpu"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(options.repeats):
        device.wait()
        begin = time.perf_counter()
        peer.forward()
        device.wait()
        middle = time.perf_counter()
        peer.backward()
        device.wait()
        end = time.perf_counter()
        times.append((middle - begin, end - middle, end - begin))
    forward, backward, total = (1e3 * statistics.median(x) for x in zip(*times, strict=True))
    gib = torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0
    return {"forward_ms": forward, "backward_ms": backward, "total_ms": total, "gib": gib}


def measured(
    device: Device, options: argparse.Namespace, wrong: dict[str, str | None]
) -> Iterator[Row]:
    """Every peer at every shape."""
    for shape in options.shapes:
        inputs, ours = inputs_of(device, shape), None
        for name in options.peers:
            row = Row("x".join(map(str, shape)), name, reason=wrong[name])
            if row.reason is None:
                try:
                    found = timed(make(name, inputs, device, options), device, options)
                    vars(row).update(found)
                    work = 14 * pairs(shape, name.startswith("dense")) * device.heads * device.dim
                    row.tflops = work / found["total_ms"] / 1e9
                    ours = row.total_ms if name == OURS else ours
                    row.times_ours = found["total_ms"] / ours if ours else None
                except Exception as error:  # noqa: BLE001 - the others go on
                    row.reason = reason_of(error)
                free(device)
            yield row


def summary(shape: Shape, rows: list[Row]) -> dict[str, Any]:
    """Ours against the fastest copies, the FLOP ratio, and FlexAttention, at one shape."""
    done = {row.peer: row.total_ms for row in rows if row.total_ms is not None}
    ours, ratio = done.get(OURS), pairs(shape, True) / pairs(shape, False)

    def fastest(kind: str) -> tuple[str | None, float | None]:
        names = [name for name in done if name.startswith(kind)]
        best = min(names, key=lambda name: done[name], default=None)
        return best, done[best] / ours if best and ours else None

    (dense, speedup), (flex, over_flex) = fastest("dense"), fastest("flex")
    return {
        "shape": "x".join(map(str, shape)), "flop_ratio": ratio, "fastest_dense": dense,
        "speedup": speedup, "of_flop_ratio": speedup / ratio if speedup else None,
        "fastest_flex": flex, "over_flex": over_flex,
    }  # fmt: skip


def reason_of(error: Exception) -> str:
    """The first line of an error."""
    text = next(iter(str(error).strip().splitlines()), "")
    return f"cannot run: {type(error).__name__}: {text}"[:300]


def free(device: Device) -> None:
    """Gives a peer's memory back; after a fault on the device that fails, and so will the rest."""
    gc.collect()
    if device.name != "cpu":
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:
            print(f"the device is lost: {reason_of(error)}", flush=True)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=parse_shapes, default=parse_shapes(DUALKV))
    parser.add_argument("--check-shape", type=parse_shapes, default=parse_shapes("4x1024x512"))
    parser.add_argument("--peers", help="names by comma; default: those that a device has")
    parser.add_argument("--kernel", default="auto", help="of ours (default auto)")
    parser.add_argument("--segment-tokens", type=int, default=8192, help="of a wave (default 8192)")
    parser.add_argument(
        "--dense-tokens", type=int, default=131072,
        help="most positions of whole rollouts in a call (default 131072; 0: a call each)",
    )  # fmt: skip
    parser.add_argument("--flex-mode", help="of torch.compile, e.g. max-autotune-no-cudagraphs")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="written after every row")
    options = parser.parse_args(arguments)
    options.peers = (options.peers or PEERS[options.device]).split(",")
    (options.check_shape,) = options.check_shape
    return options


def main(arguments: list[str] | None = None) -> int:
    """Compares, measures, prints and writes; the exit code."""
    options = parse_arguments(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: give --device cpu to try the script")
    device, on_gpu = Device(options), options.device == "cuda"
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "options": {name: str(value) for name, value in vars(options).items()},
    }
    print(report, flush=True)
    report["wrong"] = wrong = checked(device, options)
    rows: list[Row] = []
    report["summary"] = []
    for row in measured(device, options, wrong):
        rows.append(row)
        print(row.line(), flush=True)
        report["rows"] = [asdict(one) for one in rows]
        if len(rows) % len(options.peers) == 0:
            shape = options.shapes[len(rows) // len(options.peers) - 1]
            report["summary"].append(summary(shape, rows[-len(options.peers) :]))
            print(report["summary"][-1], flush=True)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    differs = [name for name, why in wrong.items() if why and why.startswith("DIFFERS")]
    failed = wrong[OURS] or any(row.reason for row in rows if row.peer == OURS)
    return 1 if differs or failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
