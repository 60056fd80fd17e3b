"""Progress on stderr: a bar if it is a terminal, else lines. [pure]

rich is imported only for a bar.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
Show = Callable[[int, str], None]
"""Takes how many are done, and words on the last of them."""
Advance = Callable[..., None]
"""Takes how many more are done, and words on what comes next."""
LINE_EVERY = 5.0
"""Seconds between lines."""
ALIVE_EVERY = 30.0
"""Seconds without a line after which one says that the job runs."""


@contextlib.contextmanager
def progress(args: argparse.Namespace, what: str, total: int | None = None) -> Iterator[Advance]:
    """Shows how many of something are done; yields the function that takes each advance, and words
    on what comes next.

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

        def advance(count: int, words: str = "") -> None:
            nonlocal done
            done += count
            show(done, words)

        yield advance


@contextlib.contextmanager
def steps_shown(every_s: float | None, total: int, first_rank: bool = True) -> Iterator[Show]:
    """Shows steps with a few words on each; yields the function that takes number and words.

    Args:
        every_s: if stderr is not a terminal, at most one line in so many seconds, but for the first
            step and the last; 0: a line per step; None: nothing.
        total: number of the last step.
        first_rank: whether this rank shows anything.
    """
    with contextlib.ExitStack() as shown:
        show: Show = _nothing
        if first_rank and sys.stderr.isatty():
            show = shown.enter_context(_bar("steps", total))
        elif first_rank and every_s is not None:
            show = shown.enter_context(_step_lines(every_s, total))
        yield show


def _nothing(done: int, words: str) -> None:
    """Shows nothing."""


class _Lines:
    """Lines on stderr; one comes now and then while nothing else does, so that nobody takes it for
    a job that hangs."""

    def __init__(self) -> None:
        self.begin, self.printed = time.monotonic(), -math.inf

    def line(self, text: str) -> None:
        """Prints one."""
        self.printed = time.monotonic()
        print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def alive(self, text: Callable[[], str]) -> Iterator[None]:
        """Prints seconds and `text` after every `ALIVE_EVERY` seconds without a line."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(ALIVE_EVERY):
                now = time.monotonic()
                if now - max(self.printed, self.begin) >= ALIVE_EVERY:
                    self.line(f"{now - self.begin:.0f} s, {text()}")

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


@contextlib.contextmanager
def _step_lines(every_s: float, total: int) -> Iterator[Show]:
    """Lines of steps."""
    done, lines = 0, _Lines()

    def show(number: int, words: str) -> None:
        nonlocal done
        done = number
        if number == total or time.monotonic() - lines.printed >= every_s:
            lines.line(f"step {number} of {total}: {words}")

    with lines.alive(lambda: f"{done} of {total} steps done"):
        yield show


@contextlib.contextmanager
def draws_aligned(args: argparse.Namespace | None, dtype: str, times: int = 1) -> Iterator[Advance]:
    """The progress of an alignment, on a rank of a job; the first rank shows it. Without a terminal
    a line comes while a part of it takes long, unless machines read the result.

    Args:
        args: the parsed arguments; None shows nothing.
        dtype: of the model.
        times: alignments in a row.
    """
    import torch

    from megatron_prefix.lab.verify.align import num_draws

    several = torch.distributed.is_initialized()
    if args is None or (several and torch.distributed.get_rank()):
        yield lambda count, words="": None
        return
    what, total = "draws aligned", times * num_draws(dtype)
    with contextlib.ExitStack() as shown:
        advance = shown.enter_context(progress(args, what, total))
        if sys.stderr.isatty() or (not args.progress and args.json):
            yield advance
            return
        show, done = shown.enter_context(_alive_lines(what, total)), 0

        def both(count: int, words: str = "") -> None:
            nonlocal done
            done += count
            advance(count, words)
            show(done, words)

        yield both


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
        if time.monotonic() - last >= LINE_EVERY:
            last = time.monotonic()
            line()

    yield show
    line()


@contextlib.contextmanager
def _alive_lines(what: str, total: int) -> Iterator[Show]:
    """Lines only while one thing takes long: what that is."""
    state = f"{what}: 0 of {total}"

    def show(count: int, words: str) -> None:
        nonlocal state
        state = f"{what}: {count} of {total}{words and '; '}{words}"

    with _Lines().alive(lambda: state):
        yield show


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
