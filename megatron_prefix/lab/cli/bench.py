"""`bench`: both schedules timed side by side in one run."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_prefix.errors import StepOutOfMemory, UserError
from megatron_prefix.lab import runtime
from megatron_prefix.lab.cli import arguments, bench_memory, records
from megatron_prefix.lab.cli.inputs import load_groups
from megatron_prefix.lab.cli.modelling import add_model, machine, model_name, model_options
from megatron_prefix.lab.cli.outputs import check_outputs, check_plot, deliver
from megatron_prefix.lab.cli.progress import draws_aligned, watched
from megatron_prefix.lab.cli.report import counted, filled, number, print_records

HELP = """\
Times Megatron-Core's stock schedule and the prefix schedule on the same microbatches, packed as
trainers pack them, in one job and one run, and compares the speedup with the bound that the FLOP
count sets: on synthetic flat groups, or with --rollouts and --steps on consecutive steps of new
groups. First both schedules are aligned on a small group and a model of the same kind with few
layers; if that fails, no speedup is reported and the exit code is 1. `bench memory` measures the
device memory of a step under each memory policy (one rollout per microbatch), next to the stock
schedule and the prediction of the memory model."""
EPILOG = """\
examples:
  megatron-prefix bench --shapes 1024:64:8 --set hidden_size=512 --set num_attention_heads=8
  megatron-prefix bench --model llama3-8b --dtype bfloat16 --device cuda \\
      --shapes 10240:2048:8 16384:64:9 --plot bench.png --record bench.jsonl
  megatron-prefix bench --model qwen3-8b --set num_layers=12 --dtype bfloat16 --device cuda \\
      --rollouts rollouts.jsonl.gz --groups 8 --steps 4 --pack-tokens 16384
  megatron-prefix bench --rollouts rollouts.jsonl.gz --groups 2 --steps 2 --prefix-schedule auto
  megatron-prefix bench --rollouts rollouts.jsonl.gz --groups 4 --dp 2 --deal length
  torchrun --nproc-per-node 2 -m megatron_prefix bench --model llama3-8b --dtype bfloat16 \\
      --device cuda --cp 2 --shapes 10240:2048:8 --bench-json cp2.json
  megatron-prefix bench --load-hf Qwen3-8B --set num_layers=12 --dtype bfloat16 --device cuda
  megatron-prefix bench memory --shapes 512:64:4 --frontier 64 --capacity-gb 1
"""


NUMBERS = (
    ("--shape-groups", 1, 1, "groups of a shape, per data-parallel rank (default {})"),
    ("--groups", 1, 4, "groups per step of a rollout file (default {})"),
    ("--steps", 1, None, "time N consecutive steps of a file, each once and of new groups,"
     " after those of --warm-up (default: its first step, --repeats times)"),
    ("--step-tokens", 1, None, "take groups until a step has N tokens, instead of --groups"),
    ("--warm-up", 1, 1, "with --steps, first steps that are run and not timed (default {})"),
    ("--warm-up-calls", 1, 3, "least calls of each schedule before the timed ones (default {}: by"
     " then kernels have been chosen for the shapes; with --graph-tokens auto 16 of the prefix"
     " schedule)"),
    ("--max-tokens", 2, None, "shorten rollouts to N tokens"),
    ("--repeats", 0, 3, "without --steps, timed calls of each step (default {})"),
    ("--align-layers", 1, 2, "layers of the model that is aligned first (default {})"),
)  # fmt: skip
"""Options for numbers: flag, least, default, help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument(
        "what",
        nargs="?",
        choices=("speed", "memory"),
        default="speed",
        help="speed (default): time both schedules; memory: device memory of a step by policy",
    )
    _add_sweep(parser.add_argument_group("sweep"))
    arguments.add_baseline(parser)
    bench_memory.add_arguments(parser)
    add_model(parser, model="tiny-llama", dtype="float32")
    arguments.add_layout(parser)
    text = "cut prompts and other spans longer than N into chunks; 0: never (default {}). auto is"
    text += " refused here: `plan --chunk-tokens auto` finds a length"
    arguments.add_lengths(parser, {"chunk_tokens": text})
    arguments.add_messages(parser)


def _add_sweep(group: Any) -> None:
    """What is timed, how often, and where the result goes."""
    text = (
        "prompt tokens, response tokens, rollouts, and optionally the wave's tokens (default"
        " 1024:64:8, if no rollouts are given)"
    )
    arguments.add_text(group, "--shapes", text, metavar="P:R:n[:WAVE]", nargs="+", default=[])
    arguments.add_text(
        group, "--rollouts", "real rollouts; one row per file", nargs="+", default=[]
    )
    for flag, least, default, text in NUMBERS:
        arguments.add_number(group, flag, text, default, arguments.whole(least))
    text = (
        "with --steps, run the timed steps once beforehand: neither schedule's times then include"
        " what kernels compile and tune for new lengths"
    )
    arguments.add_switch(group, "--rehearse", text)
    text = "mode. on (default): share every step; auto: share where it pays, by the cost model"
    arguments.add_choice(group, "--prefix-schedule", text, ("on", "auto"), "on")
    text = "time passes without gradients, as for old and reference log-probs"
    arguments.add_switch(group, "--forward-only", text)
    arguments.add_text(group, "--bench-json", "write the result as JSON to FILE too")
    records.add_argument(group)
    text = (
        "draw speedups and bounds, the time of each step and of its phases, and peaks of memory;"
        " with `bench memory` the peaks by policy (png, svg, pdf)"
    )
    arguments.add_text(group, "--plot", text)


def run(args: argparse.Namespace) -> int:
    """Aligns, times, reports."""
    check_outputs(args.bench_json, args.record)
    check_plot(args.plot)
    if args.what == "memory":
        if args.record:
            raise UserError("--record takes rows of `bench`, not of `bench memory`; leave it out")
        return bench_memory.run(args)
    bench_memory.refuse_options(args)
    layout = arguments.layout_of(args, runtime.env_world_size())
    from megatron_prefix.lab.bench.work import GroupShape

    texts = args.shapes or ([] if args.rollouts else ["1024:64:8"])
    shapes = [GroupShape.parse(text) for text in texts]
    if not args.repeats:
        raise UserError("--repeats 0 is for `bench memory`; give 1 or more")
    if args.chunk_tokens == "auto":
        raise UserError("--chunk-tokens auto: give a number; `plan --chunk-tokens auto` finds one")
    if args.steps is not None and not args.rollouts:
        raise UserError("--steps is for rollout files; give --rollouts FILE, or leave it out")
    if args.rehearse and not args.steps:
        raise UserError("--rehearse needs --steps; without it give --warm-up-calls")
    verdict, rows, failures = _measure(args, layout, shapes)
    if not runtime.first_rank():
        return 0 if verdict.passed else 1
    result = {
        **machine(args),
        "layout": layout,
        "deal": args.deal,
        "forward_only": args.forward_only,
        "overlap_grad_reduce": args.overlap_grad_reduce,
        "rehearsed": args.rehearse,
        "alignment": verdict,
        "rows": rows,
        "failures": failures,
    }
    if args.record:
        records.append(args.record, result, args.prefix_schedule)
    deliver(args, result, lambda: _figure(rows), lambda: show(args, verdict, rows))
    return 0 if verdict.passed and not failures else 1


def _measure(
    args: argparse.Namespace, layout: Any, shapes: list[Any]
) -> tuple[Any, list[Any], list[str]]:
    """The verdict of the alignment, the rows and what failed, on the ranks of the layout."""
    from megatron_prefix.lab.bench.work import Setting

    options, config = model_options(args), arguments.config_of(args)
    spec, files = _files(args, options)
    work = [*_shapes(args, shapes, spec, config, layout.dp), *_steps(args, files, config)]
    setting = Setting(
        spec, layout, arguments.baseline_of(args), args.seed, args.dtype, args.forward_only,
        args.warm_up_calls,
    )  # fmt: skip
    job = (args, options, setting, config, work)
    return runtime.launch(bench_rank, layout.world_size, *job, device=args.device)


def bench_rank(
    args: argparse.Namespace, options: Any, setting: Any, config: Any, work: Sequence[Any]
) -> tuple[Any, list[Any], list[str]]:
    """One rank's part of `_measure`; the first rank shows the progress."""
    import torch

    from megatron_prefix.lab.bench import steps
    from megatron_prefix.lab.rl.like_for_like import like_for_like

    layout = setting.layout
    with options.joined(layout):
        options, config = like_for_like(options, setting.spec, config)
        work = [
            dataclasses.replace(one, config=dataclasses.replace(one.config, kernel=config.kernel))
            for one in work
        ]
        with draws_aligned(args, options.dtype) as advance:
            [verdict] = steps.aligned(options, setting, [config], args.align_layers, advance)
        if not verdict.passed:
            return verdict, [], []
        chunks = options.build(setting.spec, layout)
        known: dict[str, Any] = {}
        rows, failures = [], []
        first = torch.distributed.get_rank() == 0
        for one in watched(args, work, "rows timed", len(work)) if first else work:
            try:
                rows.append(steps.time_work(one, setting, chunks, known))
                if first:  # long before the table, which comes with the last row
                    line = LINE + (LINE_PEAKS if args.device == "cuda" else "")
                    line += LINE_GRAPHS if rows[-1].graph_tokens else ""
                    print(filled(line, vars(rows[-1])), file=sys.stderr, flush=True)
            except (torch.OutOfMemoryError, StepOutOfMemory) as error:
                if layout.world_size > 1:  # the other ranks wait inside of a step
                    raise
                failures.append(f"{one.name}: {str(error).partition('.')[0]}")
                steps.free_memory()
        return verdict, rows, failures


def _files(args: argparse.Namespace, options: Any) -> tuple[Any, dict[str, list[Any]]]:
    """The model's shape, and the groups of every file.

    A preset without a vocabulary gets that of the rollouts, at least 2048.
    """
    from megatron_prefix.lab.rl.job import fit_vocabulary

    spec = options.spec()
    own = spec.vocab_size is not None
    steps = 1 if args.steps is None else args.steps + args.warm_up
    wanted = None if args.step_tokens else args.groups * steps
    files = []
    for path in args.rollouts:
        one_file = argparse.Namespace(**{**vars(args), "rollouts": [path], "groups": wanted})
        groups, _ = load_groups(one_file, spec.vocab_size)
        if args.steps is not None and len([*_cut(args, groups)]) < steps:
            size = f"--step-tokens {args.step_tokens}" if args.step_tokens else f"{args.groups}"
            raise UserError(
                f"{path} has {counted(len(groups), 'group')} that can be used, too few for"
                f" --steps {args.steps} and --warm-up {args.warm_up} of {size}"
                f"{'' if args.step_tokens else ' groups each'}; lower --steps, --warm-up or"
                f" {'--step-tokens' if args.step_tokens else '--groups'}, or name a larger file"
            )
        files.append(groups)
    if files:
        spec, mapped = fit_vocabulary(options, [group for groups in files for group in groups])
        rest = iter(mapped)
        files = [[next(rest) for _ in groups] for groups in files]
    if not own:
        spec = dataclasses.replace(spec, vocab_size=max(2048, spec.vocab_size or 0))
    return spec, dict(zip(args.rollouts, files, strict=True))


def _shapes(
    args: argparse.Namespace, shapes: list[Any], spec: Any, config: Any, dp: int
) -> Iterator[Any]:
    """The rows of the synthetic shapes, which every data-parallel rank gets as many groups of."""
    from megatron_prefix.lab.bench.work import Work

    for shape in shapes:
        wave = config.segment_tokens if shape.segment_tokens is None else shape.segment_tokens
        groups = shape.groups(args.shape_groups * dp, spec.vocab_size, args.seed)
        one = dataclasses.replace(config, segment_tokens=wave)
        yield Work(shape.name, one, [groups], [groups], repeats=args.repeats)


def _steps(args: argparse.Namespace, files: dict[str, list[Any]], config: Any) -> Iterator[Any]:
    """The rows of the rollout files."""
    from megatron_prefix.lab.bench.work import Work

    for path, groups in files.items():
        name = Path(path).name
        if args.steps is None:
            yield Work(name, config, [groups], [groups], args.repeats)
            continue
        cut = [*_cut(args, groups)][: args.warm_up + args.steps]
        timed = cut[args.warm_up :]
        yield Work(name, config, cut[: args.warm_up] + timed * args.rehearse, timed)


def _cut(args: argparse.Namespace, groups: list[Any]) -> Iterator[list[Any]]:
    """Consecutive steps of --groups groups, or of --step-tokens tokens."""
    step: list[Any] = []
    for group in groups:
        step.append(group)
        num_tokens = sum(len(rollout) for one in step for rollout in one.rollouts)
        if num_tokens >= args.step_tokens if args.step_tokens else len(step) == args.groups:
            yield step
            step = []


# The end ------------------------------------------------------------------------------------------

COLUMNS = [
    ("P:R:n", "{short_name}"),
    ("tokens", "{raw_tokens:n}"),
    ("executed", "{executed_tokens:n}"),
    ("segments", "{segments}"),
    ("stock ms", "{stock_ms:.1f}"),
    ("prefix ms", "{prefix_ms:.1f}"),
    ("speedup", "{speedup:.2f}x"),
    ("bound", "{bound:.2f}x"),
    ("of bound", "{of_bound:.3f}"),
]
PEAKS = [("peak GiB", "{stock_gib:.1f}, {prefix_gib:.1f} ({predicted_gib:.1f})")]
"""On a GPU: on a CPU nothing is measured."""
WAVE = [("wave", "{segment_tokens}")]
LINE = (
    "{name}: {stock_ms:.1f} ms, {prefix_ms:.1f} ms, {speedup:.3f}x of {bound:.3f}x, {of_bound:.3f}"
    " of bound"
)
LINE_PEAKS = ", peaks {stock_gib:.1f} and {prefix_gib:.1f} GiB"
LINE_GRAPHS = ", CUDA graphs up to {graph_tokens:n} positions ({captured_ms:.0f} ms of captures)"
"""Of a row as soon as it has been timed; with peaks on a GPU, and with graphs if it has some."""
ATTENTION = "attention of {names}: {stock_attention} (stock), {prefix_attention} (prefix)"
NO_PEAKS = "peaks of memory: not measured on a CPU (bench memory counts what is kept)"
STEPS = (
    "{name}, stock, ms per step: {stock_steps}",
    "{name}, prefix, ms per step: {prefix_steps}",
    "{name}: {speedup:.2f}x over {steps} steps together, {median_speedup:.2f}x of their medians;"
    " shared in {shared_steps}",
)
"""Of a row with several steps."""


def show(args: argparse.Namespace, verdict: Any, rows: Sequence[Any]) -> None:
    """Prints the rows for people."""
    if not verdict.passed:
        print("NOT aligned, so nothing was timed:", *verdict.failures, sep="\n  ")
        return
    baseline = arguments.baseline_of(args)
    packs = f"packs of {number(baseline.pack_tokens)} tokens"
    on_gpu = args.device == "cuda"
    print_records(
        f"{model_name(args)}, {args.dtype}, {args.device}: a step, both schedules on"
        f" {packs if baseline.packed else 'one rollout per microbatch'}"
        f"{'; peaks: stock, prefix (predicted)' if on_gpu else ''}",
        COLUMNS
        + (PEAKS if on_gpu else [])
        + (WAVE if len({row.segment_tokens for row in rows}) > 1 else []),
        ({**vars(row), "short_name": row.name.partition(".")[0]} for row in rows),
        wrap=False,
    )
    _print_attention(rows)
    if not on_gpu:
        print(NO_PEAKS)
    for row in rows:
        times = {
            "stock_steps": ", ".join(f"{one:.1f}" for one in row.stock_step_ms),
            "prefix_steps": ", ".join(f"{one:.1f}" for one in row.prefix_step_ms),
        }
        for line in STEPS if row.steps > 1 else ():
            print(filled(line, {**vars(row), **times}))


def _print_attention(rows: Sequence[Any]) -> None:
    """A line for every pair of kernels; one schedule's may differ by row."""
    names: dict[tuple[str | None, str | None], list[str]] = {}
    for row in rows:
        names.setdefault((row.stock_attention, row.prefix_attention), []).append(row.name)
    for (stock, prefix), some in names.items():
        which = "all rows" if len(names) == 1 else ", ".join(some)
        values = {"stock_attention": stock or "none", "prefix_attention": prefix or "none"}
        print(filled(ATTENTION, {"names": which, **values}))


def _figure(rows: Sequence[Any]) -> Any:
    from megatron_prefix.lab.bench.picture import figure

    return figure([vars(row) for row in rows])
