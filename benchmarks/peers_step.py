"""A whole step of a model: the prefix schedule against the packed graph with FlexAttention.

    python -m benchmarks.peers_step --json step.json         # on a GPU
    python -m benchmarks.peers_step --device cpu --dtype float64 --model tiny-llama \\
        --shape 64:16:3 --check-shape 24:8:3                 # tries the script

One group P:R:n, the same weights, losses and gradients in every row:

    prefix            the prefix schedule, one rollout per microbatch
    stock rollout     Megatron's schedule on the same microbatches
    stock packed      Megatron's schedule on packs of --pack-tokens
    graph             Megatron's schedule on one microbatch: the prompt once, and every answer
    graph, answers    the same with the output layer on the answers only, as the prefix schedule

First losses, log-probs and gradients of prefix and graph are compared with the stock schedule's on
a model with few layers by the numerics policy; in 16 bit errors against fp32 are pooled over draws.
Then each row is timed: --warm-up calls, and the median of --repeats, the optimizer's step not
included. The graph's block mask is made beforehand. The exit code is 1 if values differ or a row
could not run; the others go on.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import GIB, reason_of
from benchmarks.peers_flex import BACKENDS, BLOCK, packed_attention
from benchmarks.peers_graph_step import packed_graph, running
from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.bench.work import GroupShape
from megatron_prefix.lab.cli.modelling import overrides_of
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.models.presets import ModelSpec, resolve
from megatron_prefix.lab.numerics import DRAWS, compare
from megatron_prefix.lab.numerics.compare import Trace, Verdict
from megatron_prefix.lab.numerics.pooled import Errors
from megatron_prefix.lab.rl import loss, packing, passes, snapshot
from megatron_prefix.lab.rl.baseline import PACK_TOKENS, Baseline
from megatron_prefix.lab.rl.job import ModelOptions
from megatron_prefix.lab.verify import align
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.schedule import PrefixSchedule

PREFIX, STOCK, PACKED = "prefix", "stock rollout", "stock packed"
GRAPH, ANSWERS = "graph", "graph, answers"
Microbatch = dict[str, Any]
Step = Callable[[Callable[..., Any]], Any]
"""Calls a function (schedule, microbatches) with those of a row, on a model that is made ready."""


@dataclass
class Row:
    """One row; times are None if it failed, and `reason` says why."""

    name: str
    ms: float | None = None
    gib: float | None = None
    times_prefix: float | None = None
    reason: str | None = None

    def line(self) -> str:
        """The row as it is printed."""
        if self.ms is None:
            return f"{self.name:<16}  {self.reason}"
        ratio = "" if self.times_prefix is None else f"  {self.times_prefix:5.2f}x prefix"
        return f"{self.name:<16}  {self.ms:9.2f} ms  {self.gib:6.1f} GiB{ratio}"


class Steps:
    """The rows' steps on one model.

    Args:
        chunks: the model, wrapped in DDP.
        items: one microbatch per rollout.
        shared: positions of the prompt that carry no loss, all but its last.
        options: of the command line.
    """

    def __init__(
        self, chunks: list[Any], items: list[Microbatch], shared: int, options: argparse.Namespace
    ) -> None:
        self._chunks, self._items, self._shared = chunks, items, shared
        self._options = options
        config = PrefixConfig(
            min_gain=0, kernel=options.kernel, segment_tokens=options.segment_tokens
        )
        self._prefix = PrefixSchedule(config, Callbacks())

    def step(self, name: str) -> Step:
        """A row's step; see `Step`."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        stock = get_forward_backward_func()
        if name == PREFIX:
            return lambda call: call(self._prefix, self._items)
        if name == STOCK:
            return lambda call: call(stock, self._items)
        if name == PACKED:
            baseline = Baseline("packed", self._options.pack_tokens)
            packing.check(self._chunks, baseline)
            packs = packing.microbatches(self._items, baseline)
            return lambda call: call(stock, packs)
        device = next(self._chunks[0].parameters()).device
        block, only = self._options.block, name == ANSWERS
        graph = packed_graph(self._items, self._shared, multiple=block, answers_only=only)
        attention = packed_attention(
            self._shared, graph.lengths, block, device, self._options.flex, self._options.flex_mode
        )

        def step(call: Callable[..., Any]) -> Any:
            with running(self._chunks[0], graph, attention):
                return call(stock, [graph.item])

        return step

    def trace(self, name: str) -> Trace:
        """Mean loss, log-probs and gradients of one step."""
        found = self.step(name)(
            lambda schedule, items: align.run_step(schedule, self._chunks, items, optimize=False)
        )
        # Answers are of one length, so the mean over rollouts is the one over tokens.
        return replace(found, losses=found.losses.mean()[None])

    def timed(self, name: str) -> Row:
        """A row: median milliseconds, and the peak of allocated memory in GiB (0 on the CPU)."""
        step = self.step(name)
        for _ in range(self._options.warm_up):
            step(self._milliseconds)
        on_gpu = next(self._chunks[0].parameters()).is_cuda
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        times = [step(self._milliseconds) for _ in range(self._options.repeats)]
        ms = statistics.median(times)
        return Row(name, ms, torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0)

    def _milliseconds(self, schedule: Callable[..., Any], items: Sequence[Microbatch]) -> float:
        wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        wait()
        begin = time.perf_counter()
        passes.run(schedule, loss.forward_step(loss.GrpoConfig()), self._chunks, items)
        wait()
        return 1e3 * (time.perf_counter() - begin)


def items_of(shape: GroupShape, chunks: list[Any], seed: int) -> list[Microbatch]:
    """One microbatch per rollout, of random tokens and advantages, and of old log-probs near the
    model's own."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    items = align.microbatches(shape.groups(1, unwrap(chunks[0]).vocab_size, seed), seed)
    values = passes.logprobs(get_forward_backward_func(), chunks, items) or []
    return align.with_old_logprobs(items, values, seed + 1)


def model_options(options: argparse.Namespace) -> tuple[ModelOptions, ModelSpec]:
    """How the model is built, and its shape."""
    changed = overrides_of([f"num_layers={options.layers}", *options.set])
    spec = resolve(options.model, **dict(changed))
    spec = spec if spec.vocab_size else spec.with_vocab(2048)
    found = ModelOptions(
        options.model, options.dtype, options.device, layer_spec=options.layer_spec, seed=1234
    )
    return found, spec


def checked(options: argparse.Namespace) -> dict[str, Verdict | str]:
    """Prefix schedule and packed graphs against the stock schedule, on a small model: how each
    compares, or why it could not run."""
    built, spec = model_options(options)
    small = replace(spec, num_layers=min(options.check_layers, spec.num_layers))
    chunks = built.build(small, runtime.Layout())
    exact = None
    if options.dtype == "bfloat16":
        exact = built.reference(small, runtime.Layout(), chunks)()
    found: dict[str, Verdict | str] = {}
    for name in (PREFIX, GRAPH, ANSWERS):
        try:
            found[name] = _verdict(name, chunks, exact, options)
        except Exception as error:  # noqa: BLE001 - the others go on
            found[name] = reason_of(error)
        free()
        one = found[name]
        why = one if isinstance(one, str) else "; ".join(one.failures[:3])
        print(f"{name:<16}  {why or 'agrees'}", flush=True)
    return found


def _verdict(
    name: str, chunks: list[Any], exact: list[Any] | None, options: argparse.Namespace
) -> Verdict:
    """A row against the stock schedule; in 16 bit over several draws of tokens and advantages."""
    shape, errors = options.check_shape, Errors()
    for draw in range(1 if exact is None else DRAWS):
        items = items_of(shape, chunks, 100 + draw)
        steps = Steps(chunks, items, shape.prompt - 1, options)
        stock, found = steps.trace(STOCK), steps.trace(name)
        if not draw:
            tokens = shape.rollouts * (shape.prompt + shape.response)
            limits = snapshot.conditions(chunks, items, tokens=tokens, lr=0.0, eps=1e-8)
            verdict = compare.compare(stock, found, limits)
        if exact is not None:
            errors.add(stock, found, Steps(exact, items, 0, options).trace(STOCK))
    return verdict if exact is None else errors.judged(verdict)


def measured(options: argparse.Namespace, show: Callable[[Row], None]) -> None:
    """Every row, in turn."""
    built, spec = model_options(options)
    chunks = built.build(spec, runtime.Layout())
    shape, ours = options.shape, None
    steps = Steps(chunks, items_of(shape, chunks, 1), shape.prompt - 1, options)
    for name in options.rows:
        try:
            row = steps.timed(name)
        except Exception as error:  # noqa: BLE001 - the other rows go on
            row = Row(name, reason=reason_of(error))
        ours = row.ms if name == PREFIX else ours
        row.times_prefix = row.ms / ours if row.ms and ours else None
        free()
        show(row)


def free() -> None:
    """Gives memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rows = (PREFIX, STOCK, PACKED, GRAPH, ANSWERS)
    shape, add = GroupShape.parse, parser.add_argument
    add("--model", default="llama3-8b")
    add("--layers", type=int, default=4)
    add("--set", action="append", default=[], metavar="FIELD=VALUE")
    add("--shape", type=shape, default=shape("10240:2048:8"), metavar="P:R:n")
    add("--check-shape", type=shape, default=shape("512:128:4"), metavar="P:R:n")
    add("--check-layers", type=int, default=2)
    add("--rows", default=";".join(rows), help="names by semicolon; default: all")
    add("--kernel", default="auto", help="of the prefix schedule (default auto)")
    add("--segment-tokens", type=int, default=8192, help="(default 8192)")
    add("--pack-tokens", type=int, default=PACK_TOKENS, help=f"(default {PACK_TOKENS})")
    add("--flex", choices=BACKENDS, default=BACKENDS[0], help="kernel of FlexAttention")
    add("--flex-mode", help="of torch.compile, e.g. max-autotune-no-cudagraphs")
    add("--block", type=int, default=BLOCK, help="the graph's parts are padded to its multiples")
    add("--dtype", choices=("float64", "float32", "bfloat16"), default="bfloat16")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--layer-spec", choices=("auto", "local", "te"), default="auto")
    add("--warm-up", type=int, default=3, help="calls of a row before it is timed (default 3)")
    add("--repeats", type=int, default=5)
    add("--json", type=Path, help="written after every row")
    options = parser.parse_args(arguments)
    options.rows = options.rows.split(";")
    if unknown := set(options.rows) - set(rows):
        parser.error(f"--rows: {', '.join(sorted(unknown))}: give some of {'; '.join(rows)}")
    return options


def run(options: argparse.Namespace) -> int:
    """Compares, measures, prints and writes, on process groups that exist; the exit code."""
    on_gpu = options.device == "cuda"
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "options": {name: str(value) for name, value in vars(options).items()},
        "rows": [],
    }
    print(report, flush=True)
    found = checked(options)
    free()
    report["verdicts"] = {
        name: one if isinstance(one, str) else asdict(one) for name, one in found.items()
    }
    held = torch.cuda.memory_allocated() / GIB if on_gpu else 0.0
    print(f"{held:.1f} GiB are held before the model of the rows is built", flush=True)

    def show(row: Row) -> None:
        report["rows"].append(asdict(row))
        print(row.line(), flush=True)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    measured(options, show)
    failed = any(row["reason"] for row in report["rows"])
    agrees = all(isinstance(one, Verdict) and one.passed for one in found.values())
    return 0 if agrees and not failed else 1


def main(arguments: list[str] | None = None) -> int:
    """Joins a job of one rank and runs."""
    options = parse_arguments(arguments)
    runtime.initialize(runtime.Layout(), options.device)
    try:
        return run(options)
    finally:
        runtime.shutdown()


if __name__ == "__main__":
    raise SystemExit(main())
