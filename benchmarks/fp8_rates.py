"""How fast linear layers of Llama3-8B's widths are in FP8 with blockwise scales and in bfloat16.

    python -m benchmarks.fp8_rates [ROWS]

On one GPU of Hopper's with transformer-engine: forward and backward of the four linear layers of a
layer on ROWS positions (default: 16,384), quantising activations and gradients included, weights
quantised once. Prints their times and rates, and the bound of a step of 8 rollouts of 2,048 on
10,240 where FP8 is so many times as fast; `RATE` of megatron_prefix/layers/precision.py is the
tensor cores' own.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from unittest import mock

import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.bench.timing import flop_bound
from megatron_prefix.lab.bench.work import GroupShape
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.layers import precision

WIDTHS = {"qkv": (4096, 6144), "proj": (4096, 4096), "fc1": (4096, 28672), "fc2": (14336, 4096)}
REPEATS = 10


def milliseconds(call: Callable[[], None]) -> float:
    """Median of several runs, after two that are not timed."""
    times = []
    for number in range(REPEATS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        if number > 1:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def layer(inputs: int, outputs: int, rows: int, fp8: bool) -> float:
    """Forward and backward of one linear layer."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling, Format

    linear = te.Linear(inputs, outputs, bias=False, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(rows, outputs, device="cuda", dtype=torch.bfloat16)
    recipe = Float8BlockScaling(fp8_format=Format.E4M3)
    first = [True]

    def call() -> None:
        with te.fp8_autocast(enabled=fp8, fp8_recipe=recipe):
            y = linear(x, is_first_microbatch=first[0])
        first[0] = False
        y.backward(gradient)

    return milliseconds(call)


def bound(rate: float) -> float:
    """Of the shape above, where products of layers are so many times as fast."""
    spec = resolve("llama3-8b", fp8="e4m3", fp8_recipe="blockwise")
    groups = GroupShape(10240, 2048, 8).groups(1, spec.vocab_size or 0, 1)
    with mock.patch.object(precision, "RATE", rate):
        return flop_bound(spec, PrefixConfig(), [groups])


def main(rows: int) -> None:
    """Prints the table."""
    totals = [0.0, 0.0]
    for name, (inputs, outputs) in WIDTHS.items():
        times = [layer(inputs, outputs, rows, fp8) for fp8 in (False, True)]
        rates = [6e-9 * rows * inputs * outputs / one for one in times]
        totals = [total + one for total, one in zip(totals, times, strict=True)]
        print(
            f"{name}: bf16 {times[0]:.2f} ms, {rates[0]:.0f} TFLOP/s; fp8 {times[1]:.2f} ms,"
            f" {rates[1]:.0f} TFLOP/s"
        )
    rate = totals[0] / totals[1]
    print(f"a layer: {totals[0]:.2f} and {totals[1]:.2f} ms, {rate:.2f} times as fast")
    for one in (1.0, rate, precision.RATE):
        print(f"bound of 10240:2048:8 at a rate of {one:.2f}: {bound(one):.3f}x")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 16384)
