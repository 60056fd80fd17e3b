"""What verbs print: results on stdout, progress on stderr, never one in the other's place.

rich is imported where it is used: `--help` and `--json` do without it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.rollouts import Group, write_rollouts
from megatron_prefix.plan import files

if TYPE_CHECKING:
    from rich.table import Table

T = TypeVar("T")
_LINE_EVERY = 5.0  # seconds between progress lines where stderr is no terminal


def print_json(result: Mapping[str, Any]) -> None:
    """Prints `result` as one JSON object; NaN and infinity, which JSON lacks, become null."""
    print(json.dumps(finite(result), indent=2, allow_nan=False))


def finite(value: Any) -> Any:
    """The value with null instead of every NaN and infinity, which JSON lacks."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_facts(title: str, facts: Mapping[str, str], *, stderr: bool = False) -> None:
    """Prints a table of names and values for people."""
    table = new_table(title)
    table.show_header = False
    table.add_column()
    table.add_column(justify="right")
    for name, value in facts.items():
        table.add_row(name, value)
    print_rich(table, stderr=stderr)


FILE_COLUMNS = 120
"""Width of tables that go to a file."""


def new_table(title: str) -> Table:
    """An empty table in the one style of all verbs."""
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE)


def print_rich(*things: Any, stderr: bool = False) -> None:
    """Prints what rich can draw, one below the other (without colours where it is no terminal)."""
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with 1, our code for a failed check
            raise BrokenPipeError

    stream = sys.stderr if stderr else sys.stdout
    # rich takes 80 columns for a file, and would cut numbers of our wider tables.
    width = None if stream.isatty() or "COLUMNS" in os.environ else FILE_COLUMNS
    Quiet(stderr=stderr, highlight=False, width=width).print(*things, sep="\n")


def number(value: float) -> str:
    """A count for people: 12,345 or 1,234.5."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def counted(num: int, word: str) -> str:
    """A count with its word for people: 1 group, 2 groups."""
    return f"{num:,} {word}{'' if num == 1 else 's'}"


def percent(value: float) -> str:
    """A fraction for people."""
    return f"{100 * value:.1f}%"


# Progress -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def progress(
    args: argparse.Namespace, what: str, total: int | None = None
) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr; yields the function that takes each advance.

    Shown when stderr is a terminal or `--progress` is given; without a terminal, as a line now and
    then, so that a log file stays readable.

    Args:
        args: the parsed arguments.
        what: what is counted, e.g. "steps".
        total: how many there are, None when unknown.
    """
    if sys.stderr.isatty():
        with _bar(what, total) as advance:
            yield advance
    elif args.progress:
        with _lines(what, total) as advance:
            yield advance
    else:
        yield lambda count: None


@contextlib.contextmanager
def draws_aligned(
    args: argparse.Namespace | None, dtype: str, times: int = 1
) -> Iterator[Callable[[int], None]]:
    """The progress of an alignment, on a rank of a job; the first rank shows it.

    Args:
        args: the parsed arguments; None shows nothing.
        dtype: of the model.
        times: alignments in a row.
    """
    import torch

    from megatron_prefix.lab.verify.align import num_draws

    several = torch.distributed.is_initialized()
    if args is None or (several and torch.distributed.get_rank()):
        yield lambda count: None
        return
    with progress(args, "draws aligned", times * num_draws(dtype)) as advance:
        yield advance


@contextlib.contextmanager
def _bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


@contextlib.contextmanager
def _lines(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    begin = last = time.monotonic()
    done, said = 0, -1

    def line() -> None:
        nonlocal said
        if said == done:
            return
        said = done
        of = "" if total is None else f" of {total}"
        seconds = time.monotonic() - begin
        print(f"{what}: {done}{of}, {seconds:.0f} s", file=sys.stderr, flush=True)

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        if time.monotonic() - last >= _LINE_EVERY:
            last = time.monotonic()
            line()

    yield advance
    line()


def watched(
    args: argparse.Namespace,
    items: Iterable[T],
    what: str,
    total: int | None = None,
    size: Callable[[T], int] = lambda item: 1,
) -> Iterator[T]:
    """`items`, with progress shown while they pass; `size` is what one of them counts for."""
    with progress(args, what, total) as advance:
        for item in items:
            yield item
            advance(size(item))


def differences(result: Any) -> dict[str, str]:
    """Lines of a table: how far the schedules are apart, each quantity with its own limit.

    Args:
        result: an Alignment, or the Summary of a run that compared. Limits are None in 16 bit.
    """
    lines = {}
    for what, name, limit in (
        ("largest difference of a loss", "loss_max_abs_diff", result.loss_limit),
        ("of a log-prob", "logprob_max_abs_diff", getattr(result, "logprob_limit", None)),
        ("of a gradient, relative", "grad_max_rel_diff", result.tolerance),
        ("of a parameter after AdamW", "param_max_abs_diff", result.param_limit),
    ):
        if hasattr(result, name):
            allowed = "" if result.loss_limit is None else f" (at most {limit:.2e})"
            lines[what] = f"{getattr(result, name):.2e}{allowed}"
    return lines


# Files --------------------------------------------------------------------------------------------


def write_text(path: str, text: str, *, makes_folders: bool = False) -> None:
    """Writes a file whole or not at all; "-" is stdout.

    Args:
        makes_folders: whether to make the folders above it that are missing.

    Raises:
        UserError: the file cannot be written.
    """
    if path == "-":
        sys.stdout.write(text)
        return
    with files.writing(path):
        if makes_folders:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        files.write_text(path, text)


def check_outputs(*paths: str | None, makes_folders: bool = False) -> None:
    """Refuses files that cannot be written, before the work for them; None and "-" always can.

    Args:
        makes_folders: see `files.check_writable`.

    Raises:
        UserError: naming the first one.
    """
    for path in paths:
        if path and path != "-":
            files.check_writable(path, makes_folders=makes_folders)


def check_plot(path: str | None) -> None:
    """Refuses a plot that cannot be drawn, before what it shows is measured.

    Raises:
        UserError: matplotlib is missing, or does not know the file's ending.
    """
    if not path:
        return
    check_outputs(path)
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ModuleNotFoundError:
        raise UserError("--plot needs matplotlib: pip install megatron_prefix[plot]") from None
    known = FigureCanvasBase.get_supported_filetypes()
    if path.rpartition(".")[2].lower() not in known:
        raise UserError(f"--plot {path}: give a file that ends in one of .{', .'.join(known)}")


def save_figure(figure: Any, path: str) -> None:
    """Writes a figure of matplotlib whole or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format=path.rpartition(".")[2].lower())
    with files.replacing(path) as file:
        file.write(drawn.getbuffer())


def write_and_print(
    args: argparse.Namespace, groups: Iterable[Group], total: int | None = None
) -> None:
    """Writes `groups` to `args.out` as a rollout file, with progress, and prints what it holds."""
    check_outputs(args.out)
    made = {"path": args.out, **write_rollouts(args.out, watched(args, groups, "groups", total))}
    if args.json:
        print_json(made)
    else:
        print_facts("rollout file", {name: str(value) for name, value in made.items()})


def deliver(
    args: argparse.Namespace,
    result: dict[str, Any],
    draw: Callable[[], None],
    show: Callable[[], None],
) -> None:
    """Writes a benchmark's result where it was asked for, and prints it.

    Args:
        args: with `bench_json`, `plot` and `json`.
        result: with `rows` and `failures`.
        draw: writes the plot.
        show: prints for people.
    """
    if args.bench_json:
        write_text(args.bench_json, json.dumps(result, indent=2) + "\n")
    if args.plot and result["rows"]:
        draw()
    if args.json:
        print_json(result)
        return
    show()
    failures = result["failures"]
    print(*failures, sep="\n", end="\n" if failures else "")
