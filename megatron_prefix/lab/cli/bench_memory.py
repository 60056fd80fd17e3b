"""`bench memory`: device memory of a step, by policy."""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megatron_prefix.config import MOST_MEMORY_GB
from megatron_prefix.errors import UserError
from megatron_prefix.lab import runtime
from megatron_prefix.lab.cli.arguments import add_number, config_of, layout_of, real, whole
from megatron_prefix.lab.cli.modelling import machine, model_options
from megatron_prefix.lab.cli.outputs import deliver
from megatron_prefix.lab.cli.progress import draws_aligned, watched
from megatron_prefix.lab.cli.report import print_records, to_line
from megatron_prefix.lab.view.style import MORE, PREFIX, STOCK, legend_beside, without_frame

MOST = 10**6  # tokens of a response, or tries
WAYS = ("stock", "retain", "offload", "recompute")


DEFAULTS: dict[str, Any] = {
    "ways": list(WAYS), "frontier_ways": None, "frontier": None, "frontier_step": 256, "tries": 0,
    "capacity_gb": 0.0,
}  # fmt: skip
"""Of the options that only `bench memory` reads."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that only `bench memory` reads."""
    group = parser.add_argument_group("bench memory")
    ways = "what to measure: stock, or a memory policy; +full adds Megatron's full recomputation"
    for name, text in (
        ("ways", f"{ways} (default {' '.join(WAYS)})"),
        ("frontier_ways", "with --frontier, ways whose longest sequence to find (default: --ways)"),
    ):
        group.add_argument(
            _flag(name), nargs="+", default=DEFAULTS[name], metavar="POLICY[+full]", help=text
        )

    def add(name: str, text: str, kind: Callable[[str], float], metavar: str) -> None:
        add_number(group, _flag(name), text, DEFAULTS[name], kind, metavar)

    text = "also find the longest sequence that trains, with responses of R tokens"
    add("frontier", text, whole(1, MOST), "R")
    text = "with --frontier, look at lengths that are multiples of N tokens (default {})"
    add("frontier_step", text, whole(1, MOST), "N")
    text = "with --frontier, try up to N lengths near the predicted one (default {}: only predict)"
    add("tries", text, whole(0, MOST), "N")
    text = (
        "with --frontier, GiB besides weights and gradients to use (default {}: all that are free)"
    )
    add("capacity_gb", text, real(0, MOST_MEMORY_GB), "X")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def refuse_options(args: argparse.Namespace) -> None:
    """Refuses options that only `bench memory` reads.

    Raises:
        UserError: naming the first one.
    """
    for name, default in DEFAULTS.items():
        if getattr(args, name) != default:
            raise UserError(f"{_flag(name)} is for `bench memory`: add memory, or leave it out")


def run(args: argparse.Namespace) -> int:
    """Aligns, measures, reports."""
    from megatron_prefix.lab.bench.memory import Way

    ways = [Way.parse(text) for text in args.ways]
    farther = [Way.parse(text) for text in args.frontier_ways or args.ways]
    if args.chunk_tokens == "auto":
        raise UserError("--chunk-tokens auto: give a number; `plan --chunk-tokens auto` finds one")
    if args.rollouts:
        raise UserError("bench memory runs synthetic shapes: give --shapes, not --rollouts")
    failures, rows, frontiers = _measure(args, ways, farther)
    result = {
        **machine(args),
        "aligned": not failures,
        "failures": failures,
        "peaks": _peaks(args),
        "predicted": _counted(args),
        "rows": rows,
        "frontier": frontiers,
    }
    compared = functools.partial(_is_compared, args)
    deliver(args, result, lambda: figure(rows, compared), lambda: show(args, rows, frontiers))
    return 1 if failures else 0


def _measure(
    args: argparse.Namespace, ways: list[Any], farther: list[Any]
) -> tuple[list[str], list[Any], list[Any]]:
    """What failed of the alignment, and the results."""
    from dataclasses import replace

    from megatron_prefix.lab.bench import memory, steps
    from megatron_prefix.lab.bench.work import Setting
    from megatron_prefix.lab.rl.baseline import Baseline

    if layout_of(args, runtime.env_world_size()).world_size > 1:
        raise UserError("bench memory runs on one rank: leave the layout options out")
    options = model_options(args)
    config = config_of(args)
    if args.device == "cpu" and config.kernel == "auto":
        config = replace(config, kernel="math")  # as unfused as the stock schedule's attention
    spec = options.spec()
    spec = spec if spec.vocab_size else spec.with_vocab(2048)
    layout = runtime.Layout()
    with options.joined(layout):
        policies = sorted({way.policy for way in ways} - {memory.STOCK})
        configs = [replace(config, memory=policy) for policy in policies]
        setting = Setting(spec, layout, Baseline("rollout"), args.seed)
        with draws_aligned(args, options.dtype, len(configs)) as advance:
            verdicts = steps.aligned(options, setting, configs, args.align_layers, advance)
        failures = [
            f"{policy}: {failure}"
            for policy, verdict in zip(policies, verdicts, strict=True)
            for failure in verdict.failures
        ]
        if failures:
            return failures, [], []
        chunks = options.build(spec, layout)
        rows = [_told(args, row) for row in _rows(args, ways, chunks, config)]
        return [], rows, [_told(args, one) for one in _frontiers(args, farther, chunks, config)]


def _rows(args: argparse.Namespace, ways: list[Any], chunks: list[Any], config: Any) -> Any:
    from megatron_prefix.lab.bench import memory
    from megatron_prefix.lab.bench.work import GroupShape

    shapes = [GroupShape.parse(text) for text in args.shapes or ["512:64:4"]]
    work = [(shape, way) for shape in shapes for way in ways]
    for shape, way in watched(args, work, "rows measured", len(work)):
        yield memory.measure(shape, way, chunks, config, repeats=args.repeats, seed=args.seed)


def _frontiers(args: argparse.Namespace, ways: list[Any], chunks: list[Any], config: Any) -> Any:
    from megatron_prefix.lab.bench import longest
    from megatron_prefix.lab.bench.timing import GIB

    for way in ways if args.frontier else ():
        yield longest.frontier(
            args.frontier, way, chunks, config, capacity=args.capacity_gb * GIB,
            step=args.frontier_step, num_tries=args.tries, seed=args.seed,
        )  # fmt: skip


def _told(args: argparse.Namespace, one: Any) -> Any:
    """Also prints a result as JSON on stderr, so that an interrupted run keeps its results."""
    if not args.json:
        print(to_line(one), file=sys.stderr, flush=True)
    return one


def _peaks(args: argparse.Namespace) -> str:
    """What a peak is on this device."""
    return "allocated" if args.device == "cuda" else "counted"


def _counted(args: argparse.Namespace) -> str:
    """What a prediction counts on this device."""
    kept = "what layers save, K/V of prompts and their gradients"
    if args.device != "cuda":
        return f"{kept}; no temporaries, and nothing that is offloaded is measured"
    return (
        f"{kept}, temporaries of one layer and of the output layer, the gradient of its weight,"
        " scores of attention in 32 and 64 bit; no optimizer, no workspaces of libraries"
    )


# The end ------------------------------------------------------------------------------------------

COLUMNS = (
    ("way", "{way}"),
    ("step", "{predicted_gib:.3g} / {peak}"),
    ("off", "{off:.1%}"),
    ("Phase B", "{predicted_wave_gib:.3g} / {wave}"),
    ("less", "{less:.1%}"),
    ("less of all", "{of_all:.1%}"),
    ("ms", "{ms:.0f}"),
)
FRONTIER = (
    ("way", "{way}"),
    ("predicted", "{predicted:n}"),
    ("trained", "{trained:n}"),
    ("did not", "{failed:n}"),
)


def show(args: argparse.Namespace, rows: Sequence[Any], frontiers: Sequence[Any]) -> None:
    """Prints the results for people."""
    for name in dict.fromkeys(row.name for row in rows):
        mine = [row for row in rows if row.name == name]
        title = f"{name}, GiB besides weights and gradients: predicted / {_peaks(args)}"
        stock = next((row for row in mine if row.way == "stock"), None)
        values = [_values(row, stock, _is_compared(args, row.way)) for row in mine]
        print_records(title, COLUMNS, values)
        for row in mine:
            if row.problem:
                print(f"{row.way}: {row.problem}")
    print(f"predicted: {_counted(args)}")
    if not all(_is_compared(args, row.way) for row in rows):
        print("off: not of offload, whose prompt is predicted to be on the device until copied")
    title = f"longest sequence that trains, responses of {args.frontier}"
    print_records(title, FRONTIER, map(vars, frontiers))


def _values(row: Any, stock: Any, is_compared: bool) -> dict[str, Any]:
    """Of COLUMNS: "off" is the prediction's error if it is compared, "less" what Phase B saves
    against the stock schedule, without weights and gradients, and with them."""
    less = of_all = None
    if stock is not None and stock is not row:
        ours, theirs = row.wave_gib, stock.wave_gib
        if ours is None or theirs is None:
            ours, theirs = row.predicted_wave_gib, stock.predicted_wave_gib
        less = 1 - ours / theirs
        of_all = 1 - (ours + row.base_gib) / (theirs + stock.base_gib)
    measured = {"peak": row.peak_gib, "wave": row.wave_gib}
    cells = {name: "-" if gib is None else f"{gib:.3g}" for name, gib in measured.items()}
    off = row.predicted_gib / row.peak_gib - 1 if row.peak_gib and is_compared else None
    return {**vars(row), **cells, "less": less, "of_all": of_all, "off": off}


def _is_compared(args: argparse.Namespace, way: str) -> bool:
    """Whether a prediction is of what is measured: on a CPU nothing counts what is offloaded."""
    return args.device == "cuda" or not way.startswith("offload")


def figure(rows: Sequence[Any], is_compared: Callable[[str], bool] = lambda _: True) -> Any:
    """Draws peaks by policy, as bars, with the prediction as a dash where it is compared."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.name for row in rows))
    ways = list(dict.fromkeys(row.way for row in rows))
    drawn = Figure(figsize=(max(6, 1.6 * len(names)), 4), layout="constrained")
    axes, width = drawn.subplots(), 0.8 / len(ways)
    colors = itertools.cycle([STOCK, PREFIX, *MORE])
    for place, (way, color) in enumerate(zip(ways, colors, strict=False)):
        mine = [row for row in rows if row.way == way]
        at = [names.index(row.name) + place * width for row in mine]
        axes.bar(at, [row.peak_gib or 0.0 for row in mine], width, color=color, label=way)
        compared = [row.predicted_gib if is_compared(row.way) else math.nan for row in mine]
        axes.scatter(at, compared, color="black", marker="_", zorder=2)
    axes.set_xticks([number + 0.4 - width / 2 for number in range(len(names))], names)
    axes.set_ylabel("GiB besides weights and gradients\n(dash: predicted)")
    axes.set_xlabel("prompt tokens : response tokens : rollouts")
    without_frame(axes)
    legend_beside(axes)
    return drawn
