"""`bench`: both schedules timed side by side in one run."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_prefix.cli import bench_memory, report
from megatron_prefix.cli.arguments import add_lengths, config_of, whole
from megatron_prefix.cli.modelling import add_model, machine, model_options
from megatron_prefix.errors import StepOutOfMemory, UserError

HELP = """\
Times Megatron-Core's stock schedule and the prefix schedule on synthetic flat groups, in one
process and one run, and compares the speedup with the bound by the FLOP count. First both schedules
are aligned on a small group and a model of the same kind with few layers; if that fails, no speedup
is reported and the exit code is 1. `bench memory` measures the device memory of a step under each
memory policy, next to the stock schedule and the prediction of the memory model."""
EPILOG = """\
examples:
  megatron-prefix bench --shapes 1024:64:8 --set hidden_size=512 --set num_attention_heads=8
  megatron-prefix bench --model llama3-8b --dtype bfloat16 --device cuda \\
      --shapes 10240:2048:8 16384:64:9 --bench-json bench.json --plot bench.png
  megatron-prefix bench memory --shapes 512:64:4 --frontier 64 --capacity-gb 1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument(
        "what",
        nargs="?",
        choices=("speed", "memory"),
        default="speed",
        help="speed (default): time both schedules; memory: device memory of a step by policy",
    )
    group = parser.add_argument_group("sweep")
    group.add_argument(
        "--shapes",
        nargs="+",
        default=[],
        metavar="P:R:n[:WAVE]",
        help="prompt tokens, response tokens, rollouts, and optionally the wave's tokens"
        " (default 1024:64:8, where no rollouts are given)",
    )
    group.add_argument(
        "--rollouts",
        metavar="FILE",
        nargs="+",
        default=[],
        help="real rollouts; one row a file",
    )
    for option, least, usual, text in (
        ("--groups", 1, 4, "groups a file (default 4)"),
        ("--max-tokens", 2, None, "shorten rollouts to N tokens"),
        ("--repeats", 0, 3, "timed calls of each (default 3)"),
        ("--align-layers", 1, 2, "layers of the aligned model (default 2)"),
    ):
        group.add_argument(option, type=whole(least), default=usual, metavar="N", help=text)
    group.add_argument("--bench-json", metavar="FILE", help="write the result as JSON to FILE too")
    group.add_argument("--plot", metavar="FILE", help="draw speedups and bounds (png, svg, pdf)")
    bench_memory.add_arguments(parser)
    add_model(parser, model="tiny-llama", dtype="float32")
    add_lengths(parser)


def run(args: argparse.Namespace) -> int:
    """Aligns, times, reports."""
    report.check_outputs(args.bench_json)
    report.check_plot(args.plot)
    if args.what == "memory":
        return bench_memory.run(args)
    from megatron_prefix.bench.steps import GroupShape

    texts = args.shapes or ([] if args.rollouts else ["1024:64:8"])
    shapes = [GroupShape.parse(text) for text in texts]
    if not args.repeats:
        raise UserError("--repeats 0 is for `bench memory`; give 1 or more")
    if args.chunk_tokens == "auto":
        raise UserError("--chunk-tokens auto: give a number; `plan --chunk-tokens auto` finds one")
    verdict, rows, failures = _measure(args, shapes)
    result = {
        **machine(args),
        "alignment": verdict.as_json(),
        "rows": [row.as_json() for row in rows],
        "failures": failures,
    }
    report.deliver(
        args, result, lambda: _plot(args.plot, rows), lambda: _print(args, verdict, rows)
    )
    return 0 if verdict.passed and not failures else 1


def _measure(args: argparse.Namespace, shapes: list[Any]) -> tuple[Any, list[Any], list[str]]:
    import torch

    from megatron_prefix import runtime
    from megatron_prefix.bench import steps
    from megatron_prefix.models import presets

    options = model_options(args)
    config = config_of(args)
    spec = presets.resolve(options.model, **dict(options.overrides))
    spec = spec if spec.vocab_size else spec.with_vocab(2048)
    layout = runtime.Layout()
    runtime.initialize(layout, options.device, options.seed)
    try:
        [verdict] = steps.aligned(options, spec, layout, [config], args.align_layers)
        if not verdict.passed:
            return verdict, [], []
        chunks = options.build(spec, layout)
        known: dict[str, tuple[float, float]] = {}
        rows, failures = [], []
        work = list(_work(args, shapes, spec, config))
        for name, groups, one in report.watched(args, work, "rows timed", len(work)):
            try:
                rows.append(
                    steps.time_groups(
                        name, groups, spec, chunks, one,
                        repeats=args.repeats, seed=args.seed, stock_times=known,
                    )
                )  # fmt: skip
            except (torch.OutOfMemoryError, StepOutOfMemory) as error:
                failures.append(f"{name}: {str(error).partition('.')[0]}")
                steps.free_memory()
        return verdict, rows, failures
    finally:
        runtime.shutdown()


def _work(
    args: argparse.Namespace, shapes: list[Any], spec: Any, config: Any
) -> Iterator[tuple[str, list[Any], Any]]:
    """Name, groups and configuration of every row."""
    from megatron_prefix.cli.inputs import load_groups

    for shape in shapes:
        wave = config.segment_tokens if shape.segment_tokens is None else shape.segment_tokens
        group = shape.group(spec.vocab_size, args.seed)
        yield shape.name, [group], dataclasses.replace(config, segment_tokens=wave)
    for path in args.rollouts:
        one_file = argparse.Namespace(**{**vars(args), "rollouts": [path]})
        groups, _ = load_groups(one_file, spec.vocab_size)
        yield Path(path).name, groups, config


def _print(args: argparse.Namespace, verdict: Any, rows: list[Any]) -> None:
    if not verdict.passed:
        print("NOT aligned, so nothing was timed:", *verdict.failures, sep="\n  ")
        return
    table = report.new_table(f"{args.model}, {args.dtype}, {args.device}: a step of one group")
    columns = (
        "P:R:n",
        "wave",
        "stock ms",
        "prefix ms",
        "speedup",
        "bound",
        "of it",
        "peak GiB",
        "predicted",
    )
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.name, str(row.segment_tokens), f"{row.stock_ms:.1f}", f"{row.prefix_ms:.1f}",
            f"{row.speedup:.2f}x", f"{row.bound:.2f}x", f"{row.of_bound:.3f}",
            f"{row.stock_gib:.1f}, {row.prefix_gib:.1f}", f"{row.predicted_gib:.1f}",
        )  # fmt: skip
    report.print_rich(table)


def _plot(path: str, rows: list[Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [row.name for row in rows]
    figure, axes = pyplot.subplots(figsize=(max(5, 1.3 * len(rows)), 4), layout="constrained")
    places = range(len(rows))
    axes.bar(places, [row.bound for row in rows], color="#d8dee9", label="FLOP bound")
    axes.bar(places, [row.speedup for row in rows], width=0.5, color="#3b6ea5", label="measured")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(places, names)
    axes.set_ylabel("speedup over the stock schedule")
    axes.set_xlabel("prompt tokens : response tokens : rollouts, or rollout file")
    axes.legend(frameon=False)
    report.save_figure(figure, path)
