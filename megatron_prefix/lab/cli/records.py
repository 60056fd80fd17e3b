"""Measurements as rows of a JSON lines file, as benchmarks/results has them."""

from __future__ import annotations

import datetime
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_prefix.lab.cli import packages
from megatron_prefix.lab.cli.report import to_line
from megatron_prefix.plan.files import writing

FIGURES = ("stock_ms", "prefix_ms", "speedup", "bound", "of_bound", "segments", "raw_tokens",
           "executed_tokens", "graph_tokens", "captured_ms")  # fmt: skip
BUBBLES = {"bubble": "bubble", "bubble_simulated": "simulated_bubble"}
"""Of pipelines: names in tables, and of a result."""
PEAKS = ("stock_gib", "prefix_gib", "predicted_gib")
FILES = ("--record", "--bench-json", "--plot")
"""Options that name files, which no command of a row repeats."""
VERSIONS = ("transformer-engine", "flash-attn-4", "flash-linear-attention")


def append(path: str, result: Mapping[str, Any], mode: str) -> None:
    """Appends a row for each row of a result of `bench`; the file's name is the question.

    Args:
        path: of a JSON lines file, which may not exist yet.
        result: what `bench --bench-json` writes.
        mode: of the prefix schedule.

    Raises:
        UserError: the file cannot be written.
    """
    lines = [to_line(row) + "\n" for row in rows(result, Path(path).stem, mode, sys.argv[1:])]
    with writing(path), open(path, "a", encoding="utf-8") as file:
        file.writelines(lines)


def rows(
    result: Mapping[str, Any], question: str, mode: str, words: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The rows of a result of `bench`; `words` are those of the command line."""
    options = f"mode {mode}" + ", passes without gradients" * result["forward_only"]
    for row in result["rows"]:
        values = vars(row)
        bubbles = BUBBLES if result["layout"].pp > 1 else {}
        named = {name: name for name in FIGURES} | bubbles
        yield {
            "question": question,
            "subject": row.name.removesuffix(".gz").removesuffix(".jsonl"),
            "model": model_of(result),
            "layout": layout_of(result["layout"]),
            "options": options,
            "figures": {name: _short(values[of]) for name, of in named.items()},
            "peaks": {name: _short(values[name]) for name in PEAKS if values[name]},
            "machine": result["device"],
            "versions": versions_of(result),
            "commit": commit(),
            "command": f"megatron-prefix {shlex.join(_without_files(words))}",
            "date": datetime.date.today().isoformat(),
        }


def model_of(result: Mapping[str, Any]) -> str:
    """The model's name and what --set changes in it."""
    return ", ".join([str(result["model"]), *result["set"]])


def layout_of(layout: Any) -> str:
    """A layout as tables write it: "TP2 x PP2 SP", or "one rank"."""
    sizes = {"TP": layout.tp, "PP": layout.pp, "CP": layout.cp, "EP": layout.ep, "DP": layout.dp}
    names = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    return " x ".join(names) + " SP" * layout.sequence_parallel or "one rank"


def versions_of(result: Mapping[str, Any]) -> dict[str, str]:
    """Versions of what was timed."""
    known = {name: result[name] for name in ("python", "torch", "megatron_core")}
    others = {name.replace("-", "_"): packages.version(name) for name in VERSIONS}
    return known | {name: version for name, version in others.items() if version}


def commit() -> str:
    """The commit of this package's sources; "" where they are in no repository."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "rev-parse", "--short=8", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def _without_files(words: Sequence[str]) -> list[str]:
    """A command line without the files it writes."""
    kept, skips = [], False
    for word in words:
        name, has_value, _ = word.partition("=")
        if not skips and name not in FILES:
            kept.append(word)
        skips = not skips and name in FILES and not has_value
    return kept


def add_argument(group: Any) -> None:
    """The option."""
    group.add_argument(
        "--record",
        metavar="FILE",
        help="append each row to FILE as a line of JSON, with machine, versions, commit, command"
        " and date (benchmarks/results; the file's name is the question)",
    )
