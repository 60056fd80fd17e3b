"""Files that verbs write: refused before the work for them, and written whole or not at all."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_prefix.errors import UserError
from megatron_prefix.lab.cli.progress import watched
from megatron_prefix.lab.cli.report import print_facts, print_json, to_json
from megatron_prefix.lab.data.rollouts import Group, write_rollouts
from megatron_prefix.plan import files


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
        raise UserError("--plot needs matplotlib: pip install matplotlib") from None
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
    args: argparse.Namespace,
    groups: Iterable[Group],
    total: int | None = None,
    counts: Mapping[str, int] | None = None,
) -> None:
    """Writes `groups` to `args.out` as a rollout file, with progress, and prints what it holds.

    Args:
        args: with `out` and `overwrite`.
        groups: to write.
        total: how many there are, if that is known.
        counts: what else was counted by the time that all are written, to print.

    Raises:
        UserError: the file is there already and `args.overwrite` is not given, or it cannot be
            written.
    """
    check_outputs(args.out)
    if os.path.isfile(args.out) and not args.overwrite:
        fix = "add --overwrite to replace it, or name another"
        raise UserError(f"{args.out}: already exists; {fix}")
    made = {"path": args.out, **write_rollouts(args.out, watched(args, groups, "groups", total))}
    made |= counts or {}
    if args.json:
        print_json(made)
    else:
        print_facts("rollout file", {name: str(value) for name, value in made.items()})


def deliver(
    args: argparse.Namespace,
    result: Mapping[str, Any],
    draw: Callable[[], Any],
    show: Callable[[], None],
) -> None:
    """Writes a benchmark's result to the files that were asked for, and prints it.

    Args:
        args: with `bench_json`, `plot` and `json`.
        result: with `rows` and `failures`.
        draw: makes the plot's figure.
        show: prints for people.
    """
    if args.bench_json:
        write_text(args.bench_json, to_json(result) + "\n")
    if args.plot and result["rows"]:
        save_figure(draw(), args.plot)
    if args.json:
        print_json(result)
        return
    show()
    failures = result["failures"]
    print(*failures, sep="\n", end="\n" if failures else "")
