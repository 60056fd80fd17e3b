"""`matrix`: `align` over many layouts, one line per layout."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megatron_prefix.errors import UserError, shown
from megatron_prefix.lab import platforms, runtime
from megatron_prefix.lab.cli.arguments import add_deal, add_messages, add_switch, add_text, whole
from megatron_prefix.lab.cli.modelling import Job, add_device
from megatron_prefix.lab.cli.outputs import check_outputs, write_text
from megatron_prefix.lab.cli.progress import progress
from megatron_prefix.lab.cli.report import counted, print_json, print_table, to_line
from megatron_prefix.lab.plans.dealing import DEALS
from megatron_prefix.lab.runtime.groups import MESSAGE_TIMEOUT_MINUTES
from megatron_prefix.lab.verify import matrix
from megatron_prefix.lab.verify.matrix import Result, Row
from megatron_prefix.plan.files import read_text, writing

HELP = """\
Aligns the prefix schedule with Megatron-Core's stock schedule in many layouts: models without and
with experts, flat groups, trees and chunks with one rollout per microbatch, packed microbatches,
without and with activation recomputation. Every row is one `align` in a fresh set of ranks. Under
torchrun the rows run in its world, data parallelism filling it. Exit code 0 if every row is
aligned."""
EPILOG = """\
examples:
  megatron-prefix matrix --only 'dense/*/flat/none' '*/TP2xPP2/*'
  megatron-prefix matrix --only '*/packed/*' --device cpu
  megatron-prefix matrix --only '*/DP2/*' --deal length
  megatron-prefix matrix --continue rows.jsonl --markdown matrix.md
  torchrun --nproc-per-node 8 -m megatron_prefix matrix --device cuda --only 'dense/*'
"""
TITLE = "Prefix schedule against Megatron-Core's stock schedule in the same layout"
OF_VERDICT = (
    "grad_max_rel_diff", "tolerance", "grad_error_ratio_max", "baseline", "compared_with"
)  # fmt: skip
"""What a Result has of a row's Alignment."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    group = parser.add_argument_group("rows")
    group.add_argument(
        "--only",
        nargs="+",
        default=["*"],
        metavar="PATTERN",
        help="run rows MODEL/LAYOUT/SHAPE/RECOMPUTE that match a pattern, e.g. 'moe/EP*/tree/full'",
    )
    text = (
        "append results to FILE (JSON lines), and leave out rows that are aligned there; its folder"
        " is made"
    )
    add_text(group, "--continue", text, dest="record")
    add_switch(group, "--allow-refused", "exit code 0 even if rows were refused")
    text = "data type of weights and activations (default: float64 on the CPU, bfloat16 on a GPU)"
    add_device(group, None, text)
    add_deal(group)
    group.add_argument(
        "--timeout",
        type=whole(1, 10**6),
        default=120,
        metavar="S",
        help="seconds per row (default 120)",
    )
    add_text(group, "--markdown", "write the table as Markdown; its folder is made")
    add_messages(parser, watchdog=False)


def run(args: argparse.Namespace) -> int:
    """Runs the rows and prints the table."""
    if args.dtype is None:
        args.dtype = "float64" if args.device == "cpu" else "bfloat16"
    chosen = [row for row in matrix.rows() if any(fnmatchcase(row.name, p) for p in args.only)]
    if not chosen:
        known = ", ".join(matrix.LAYOUTS)
        raise UserError(f"--only {' '.join(args.only)}: matches no row; layouts: {known}")
    platforms.check(args.device)  # else every row would be refused by itself
    check_outputs(args.markdown, args.record, makes_folders=True)
    world = runtime.env_world_size()
    known_results = _read(args, world) if args.record else {}
    results = list(_results(args, chosen, known_results, world))
    if runtime.first_rank():
        _print(args, results)
    good = ("aligned", "refused") if args.allow_refused else ("aligned",)
    return 0 if all(result.status in good for result in results) else 1


def _run_name(args: argparse.Namespace, world: int | None) -> str:
    """What rows must have in common to be shown together."""
    ranks = "" if world is None else f", {world} ranks"
    layers = "" if args.layer_spec == "auto" else f", {args.layer_spec} layers"
    deal = "" if args.deal == DEALS[0] else f", deal {args.deal}"
    return f"{args.dtype} on {args.device}{ranks}{layers}{deal}"


def _results(
    args: argparse.Namespace, rows: Sequence[Row], known: dict[str, Result], world: int | None
) -> Iterator[Result]:
    """Runs what is not known yet, row by row, and writes it down."""
    speaks = runtime.first_rank()
    with progress(args, "rows", len(rows)) as advance:
        for row in rows:
            result = known.get(row.name)
            if result is None:
                result = _run_row(args, row, world)
                if speaks and args.record:
                    _append(args.record, result)
                if speaks and not args.json:
                    _tell(result)
            advance(1)
            yield result


def _tell(result: Result) -> None:
    """A line on stderr, above the bar, so that a long run can be followed."""
    reason = result.reason or f"{result.cell}, {result.run}"
    line = f"{result.seconds:6.1f} s  {result.row}: {result.status} ({reason})"
    print(line, file=sys.stderr, flush=True)


# One row ------------------------------------------------------------------------------------------


def _run_row(args: argparse.Namespace, row: Row, world: int | None) -> Result:
    """One row, whatever comes of it."""
    begin, name, ranks = time.monotonic(), _run_name(args, world), row.layout_in().world_size

    def ended(status: str, reason: str) -> Result:
        seconds = time.monotonic() - begin
        return Result(row.name, status, ranks, seconds, reason=reason, run=name)

    try:
        ranks = row.layout_in(world).world_size
        verdict = align_row(
            row,
            args.device,
            args.dtype,
            world,
            args.layer_spec,
            args.message_timeout_minutes,
            args.deal,
            timeout_s=args.timeout,
        )
    except UserError as error:
        return ended("refused", str(error).partition("\n")[0])
    except runtime.RankError as error:
        if world is not None:  # another rank of torchrun is gone, and so would be that of every row
            raise
        print(f"{row.name}: {error}", file=sys.stderr, flush=True)
        return ended("failed", str(error).strip().splitlines()[-1])
    for failure in verdict.failures:
        print(f"{row.name}: {failure}", file=sys.stderr, flush=True)
    result = ended("aligned" if verdict.passed else "different", "; ".join(verdict.failures[:1]))
    return dataclasses.replace(result, **{name: getattr(verdict, name) for name in OF_VERDICT})


def align_row(
    row: Row,
    device: str = "cpu",
    dtype: str = "float64",
    world: int | None = None,
    layer_spec: str = "auto",
    message_timeout_minutes: float = MESSAGE_TIMEOUT_MINUTES,
    deal: str = DEALS[0],
    **options: Any,
) -> Any:
    """The `Alignment` of a row, in a fresh set of ranks, or in torchrun's world.

    Args:
        row: which.
        device: "cpu" or "cuda".
        dtype: of the model.
        world: size of torchrun's world, of which this process is a rank; None starts the ranks.
        layer_spec: see ModelOptions.
        message_timeout_minutes: see ModelOptions.
        deal: see Baseline.
        options: of `runtime.run_ranks`.

    Raises:
        UserError: the row cannot run.
        RankError: a rank failed, or the row took too long.
    """
    if device == "cpu":
        platforms.select(device)  # first: Megatron's import then takes two seconds less
    from megatron_prefix.lab.cli.align import align_rank
    from megatron_prefix.lab.rl.job import ModelOptions, fit_vocabulary

    layout, shape = row.layout_in(world), matrix.SHAPES[row.shape]
    model = ModelOptions(
        matrix.MODELS[row.model],
        dtype,
        device,
        row.recompute,
        layer_spec,
        overrides=tuple(row.overrides(dtype).items()),
        message_timeout_minutes=message_timeout_minutes,
    )
    spec, groups = fit_vocabulary(model, shape.groups(layout.dp, dtype))
    job = Job(model, spec, layout, tuple(groups))
    baseline = dataclasses.replace(shape.baseline(dtype), deal=deal)
    work = (job, shape.config(dtype), baseline)
    if world is not None:
        return runtime.launch(align_rank, world, *work)
    fork = device == "cpu" and sys.platform == "linux"
    if fork:  # ranks share what their parent has imported
        import torch._dynamo  # noqa: F401

        from megatron_prefix.lab.verify import align  # noqa: F401
    method = "fork" if fork else "spawn"
    return runtime.run_ranks(align_rank, layout.world_size, work, start_method=method, **options)[0]


# The record ---------------------------------------------------------------------------------------


def _read(args: argparse.Namespace, world: int | None) -> dict[str, Result]:
    """Rows of the record that need not run again; every rank of a world must be told the same."""
    path, name = Path(args.record), _run_name(args, world)
    if world is not None and path.exists():
        raise UserError(f"--continue {path}: under torchrun give a file that does not exist yet")
    known: dict[str, Result] = {}
    try:
        lines = read_text(path).splitlines() if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--continue {shown(args.record)}: cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        try:
            result = matrix.result_of(json.loads(line))
        except (ValueError, RecursionError, TypeError):
            raise UserError(
                f"--continue {path}:{number}: not a row of `matrix --continue`; name another file"
            ) from None
        if result.run == name:
            known[result.row] = result
    return {row: result for row, result in known.items() if result.status == "aligned"}


def _append(path: str, result: Result) -> None:
    with writing(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(to_line(result) + "\n")


# The end ------------------------------------------------------------------------------------------


def _print(args: argparse.Namespace, results: Sequence[Result]) -> None:
    run, counts = results[0].run, matrix.counts(results)
    title = f"{TITLE} ({run})"
    if args.markdown:
        write_text(args.markdown, matrix.markdown(results, title), makes_folders=True)
    if args.json:
        print_json({"run": run, "counts": counts, "rows": results})
        return
    head, *lines = matrix.table(results)
    print_table(title, head, lines, left=1, unwrapped=1)
    print(matrix.said(results))
    for why, names in matrix.notes(results).items():
        print(f"  {why} ({counted(len(names), 'row')}, e.g. {names[0]})")
