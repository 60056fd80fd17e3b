"""What sharing gives if only adapters are trained, compared with training all weights.

    python -m benchmarks.lora_step [PROMPT:RESPONSE:ROLLOUTS ...]

Both schedules on the same microbatches, with adapters on frozen linear layers
(tests/harness/lora.py) and without. A frozen weight has no gradient of its own, so a linear layer's
backward costs one forward instead of two; attention's costs two in either case. The bound is the
ratio of FLOPs counted so. One process, on the CPU in float32, in seconds of CPU time; gradients are
compared before anything is timed.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.bench.work import GroupShape
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.models import build
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.numerics import relative_error, tolerance
from megatron_prefix.lab.rl import flops, loss, passes
from megatron_prefix.lab.verify import align
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.tree import build as build_forest
from tests.harness import lora
from tests.harness.one_rank import one_rank

SPEC = resolve(
    "tiny-llama", hidden_size=256, num_attention_heads=4, kv_channels=64, ffn_hidden_size=768,
    init_method_std=0.04,
).with_vocab(2048)  # fmt: skip
CONFIG = PrefixConfig(mode="on")
REPEATS = 3


def bound(shape: GroupShape, backward: float) -> float:
    """FLOPs of the stock schedule over the prefix schedule's.

    Args:
        backward: forwards that the backward of a linear layer costs; attention's costs two.
    """
    forest = build_forest(
        *pairs_of_groups(shape.groups(1, 2048, 1)), CONFIG.tree_options(1)
    ).all_read()
    linear, head, pair, *_ = flops.cost_model(SPEC).forward
    passes = 1 + backward
    counted = CostModel.of_flops(passes * linear, passes * head, 3 * pair, action_tokens=0.0)
    return counted.speedup(forest)


def adapted_chunk(recipe: Any, stage: int, make: Any = build.build_chunk) -> Any:
    """A chunk with adapters, instead of `build.build_chunk`."""
    chunk = make(recipe, stage)
    lora.adapt(unwrap(chunk))
    return chunk


def measure(shape: GroupShape, adapters: bool) -> str:
    """One row: seconds of both schedules, their ratio, and the bound."""
    patch = mock.patch.object(build, "build_chunk", adapted_chunk) if adapters else nullcontext()
    with patch:
        chunks = build_model(SPEC)
    items = align.microbatches(shape.groups(1, 2048, 1), 1)
    step = loss.forward_step(loss.GrpoConfig(clip_low=1.0, clip_high=1e9))
    schedules: dict[str, Any] = {"stock": stock_schedule(), "prefix": PrefixSchedule(CONFIG)}
    found: dict[str, Any] = {}
    for name, schedule in schedules.items():
        chunks[0].zero_grad_buffer()
        passes.run(schedule, step, chunks, items)
        found[name] = {n: p.main_grad.clone() for n, p in named(chunks[0])}
    positions = sum(item["tokens"].numel() for item in items)
    limit = tolerance(torch.float32, positions, SPEC.ffn_hidden_size, SPEC.num_layers + 1)
    largest = max(float(one.abs().max()) for one in found["stock"].values())
    for name, one in found["stock"].items():
        scale = max(float(one.abs().max()), 1e-2 * largest)
        apart = relative_error(found["prefix"][name], one) * float(one.abs().max()) / scale
        if not apart <= limit:
            sys.exit(f"{name}: gradients differ by {apart:.2e}, more than {limit:.2e}")
    times: dict[str, list[float]] = {name: [] for name in schedules}
    for _ in range(REPEATS):  # in turn, so that a busy moment hits both
        for name, schedule in schedules.items():
            chunks[0].zero_grad_buffer()
            begin = time.process_time()
            passes.run(schedule, step, chunks, items)
            times[name].append(time.process_time() - begin)
    stock, prefix = (statistics.median(times[name]) for name in ("stock", "prefix"))
    return (
        f"{shape.name:16} {'adapters' if adapters else 'all weights':12} {stock:8.3f} s"
        f" {prefix:8.3f} s {stock / prefix:7.2f}x of {bound(shape, 1 if adapters else 2):.2f}x"
    )


def named(chunk: Any) -> list[tuple[str, Any]]:
    """What is trained."""
    return [(n, p) for n, p in unwrap(chunk).named_parameters() if p.requires_grad]


if __name__ == "__main__":
    print(f"{'P:R:n':16} {'trained':12} {'stock':>10} {'prefix':>10} speedup of bound")
    with one_rank():
        for text in sys.argv[1:] or ["256:32:6", "192:96:6"]:
            for adapters in (False, True):
                print(measure(GroupShape.parse(text), adapters), flush=True)
