"""Progress on stderr: a bar if it is a terminal, else lines on demand. [pure]

rich is imported only for a bar.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
Show = Callable[[int, str], None]
"""Takes how many are done, and words on the last of them."""
_LINE_EVERY = 5.0  # seconds between lines


@contextlib.contextmanager
def progress(
    args: argparse.Namespace, what: str, total: int | None = None
) -> Iterator[Callable[[int], None]]:
    """Shows how many of something are done; yields the function that takes each advance.

    Shown if stderr is a terminal, or with `--progress` as a line now and then, so that a log file
    stays readable.

    Args:
        args: the parsed arguments.
        what: what is counted, e.g. "steps".
        total: how many there are; None if unknown.
    """
    done = 0
    with contextlib.ExitStack() as shown:
        show: Show = _nothing
        if sys.stderr.isatty():
            show = shown.enter_context(_bar(what, total))
        elif args.progress:
            show = shown.enter_context(_lines(what, total))

        def advance(count: int) -> None:
            nonlocal done
            done += count
            show(done, "")

        yield advance


@contextlib.contextmanager
def steps_shown(wanted: bool, total: int, first_rank: bool = True) -> Iterator[Show]:
    """Shows steps with a few words on each; yields the function that takes number and words.

    Args:
        wanted: whether to print a line per step if stderr is not a terminal.
        total: number of the last step.
        first_rank: whether this rank shows anything.
    """
    if first_rank and sys.stderr.isatty():
        with _bar("steps", total) as show:
            yield show
    else:
        yield _line_per_step(total) if first_rank and wanted else _nothing


def _nothing(done: int, words: str) -> None:
    """Shows nothing."""


def _line_per_step(total: int) -> Show:
    return lambda number, words: print(
        f"step {number} of {total}: {words}", file=sys.stderr, flush=True
    )


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
def _bar(what: str, total: int | None) -> Iterator[Show]:
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.SpinnerColumn(),
        bars.TextColumn(what),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("{task.description}"),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, words: bar.update(task, completed=done, description=words)


@contextlib.contextmanager
def _lines(what: str, total: int | None) -> Iterator[Show]:
    begin = last = time.monotonic()
    done, printed = 0, -1
    of = "" if total is None else f" of {total}"

    def line() -> None:
        nonlocal printed
        if printed != done:
            printed = done
            seconds = time.monotonic() - begin
            print(f"{what}: {done}{of}, {seconds:.0f} s", file=sys.stderr, flush=True)

    def show(count: int, words: str) -> None:
        nonlocal done, last
        done = count
        if time.monotonic() - last >= _LINE_EVERY:
            last = time.monotonic()
            line()

    yield show
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
