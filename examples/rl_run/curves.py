"""What a run's updates.jsonl says: a table, summary.json, and curves if matplotlib is installed.

python examples/rl_run/curves.py OUTPUT [OUTPUT ...]
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_prefix.lab.view.style import FLOOR, PREFIX, STOCK, without_frame

LABELS = {
    "stock": ("stock schedule", STOCK, "-"),
    "reordered": ("stock schedule, other order", FLOOR, ":"),
    "prefix": ("prefix schedule", PREFIX, "--"),
}
PANELS = {
    "reward": "reward",
    "entropy": "entropy, nats a token",
    "loss": "loss",
    "update_s": "seconds of an update",
}
WINDOW = 10
"""Updates that begin and end a curve."""
MOST_ERRORS = 3.0
"""Standard errors within which two runs' rewards are alike."""
UPDATES = "updates.jsonl"
"""A row of JSON an update."""
Rows = Sequence[dict[str, Any]]


def summarise(outputs: Sequence[Path]) -> dict[str, Any]:
    """Writes summary.json and curves.svg into the first folder, and prints the table; of folders
    that have the same run the last one's counts."""
    output, runs = outputs[0], dict[str, list[dict[str, Any]]]()
    for folder in outputs:
        lines = (folder / UPDATES).read_text(encoding="utf-8").splitlines()
        rows = [*map(json.loads, lines)]
        names = dict.fromkeys(row["run"] for row in rows)
        runs |= {run: [row for row in rows if row["run"] == run] for run in names}
    summary: dict[str, Any] = {run: of_run(rows) for run, rows in runs.items()}
    for other in ("reordered", "prefix"):
        if "stock" in runs and other in runs:
            summary[f"stock_and_{other}"] = difference(runs["stock"], runs[other])
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(table(summary))
    try:
        draw(runs, output / "curves.svg")
    except ImportError:
        print("curves.svg is not drawn: pip install matplotlib")
    return summary


def of_run(rows: Rows) -> dict[str, float]:
    """Figures of one run; times are medians of its updates after the first ones."""

    def mean(name: str, part: Rows) -> float:
        return statistics.fmean(row[name] for row in part)

    steady = rows[WINDOW:] or rows
    times = ("update_s", "step_s", "sampling_s")
    peaks = [row["peak_gib"] for row in rows if "peak_gib" in row]
    return {
        "updates": len(rows),
        "first_reward": mean("reward", rows[:WINDOW]),
        "last_reward": mean("reward", rows[-WINDOW:]),
        "last_length": mean("length", rows[-WINDOW:]),
        "last_entropy": mean("entropy", rows[-WINDOW:]),
        **{name: statistics.median(row[name] for row in steady) for name in times},
        "executed_share": sum(r["executed_tokens"] for r in rows)
        / sum(r["raw_tokens"] for r in rows),
        **({"peak_gib": max(peaks)} if peaks else {}),
    }


def difference(stock: Rows, other: Rows) -> dict[str, Any]:
    """Of the rewards of two runs on the same questions, update by update.

    Once a rounding has changed one sampled token, runs go their own ways: so their mean difference
    is held against its standard error, and the same is said of two stock runs.
    """
    differences = [b["reward"] - a["reward"] for a, b in zip(stock, other, strict=False)]
    apart = [number for number, change in enumerate(differences, start=1) if change]
    mean, num = statistics.fmean(differences), len(differences)
    error = statistics.stdev(differences) / math.sqrt(num) if num > 1 else 0.0
    return {
        "mean_reward_difference": mean,
        "standard_error": error,
        "first_update_apart": apart[0] if apart else None,
        "alike": abs(mean) <= MOST_ERRORS * error,
        "speedup_of_updates": of_run(stock)["update_s"] / of_run(other)["update_s"],
        "speedup_of_steps": of_run(stock)["step_s"] / of_run(other)["step_s"],
    }


def table(summary: dict[str, Any]) -> str:
    """Of all runs."""
    columns = [
        ("first_reward", "reward, first 10", ".3f"), ("last_reward", "last 10", ".3f"),
        ("last_entropy", "entropy", ".3f"), ("update_s", "update, s", ".3f"),
        ("step_s", "step, s", ".3f"), ("sampling_s", "sampling, s", ".3f"),
        ("executed_share", "executed", ".1%"), ("peak_gib", "peak, GiB", ".1f"),
    ]  # fmt: skip
    lines = ["  ".join([f"{'':10}", *(f"{title:>16}" for _, title, _ in columns)])]
    for run in LABELS:
        if run in summary:
            cells = [format(summary[run].get(name, math.nan), spec) for name, _, spec in columns]
            lines.append("  ".join([f"{run:10}", *(f"{cell:>16}" for cell in cells)]))
    for other in ("reordered", "prefix"):
        compared = summary.get(f"stock_and_{other}")
        if compared:
            lines.append(
                f"stock and {other}: rewards differ by {compared['mean_reward_difference']:+.4f}"
                f" (standard error {compared['standard_error']:.4f}):"
                f" {'alike' if compared['alike'] else 'NOT alike'};"
                f" updates {compared['speedup_of_updates']:.2f}x,"
                f" steps {compared['speedup_of_steps']:.2f}x"
            )
    return "\n".join(lines)


def draw(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Curves of all runs, a panel for each figure."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(11.0, 6.6), layout="constrained")
    for axes, (name, title) in zip(drawn.subplots(2, 2).flat, PANELS.items(), strict=True):
        for run, rows in runs.items():
            label, color, style = LABELS[run]
            numbers = [row["update"] for row in rows]
            axes.plot(numbers, [row[name] for row in rows], style, color=color, label=label)
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("update")
        without_frame(axes)
    drawn.legend(
        *axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False
    )
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # equal runs, equal files
    drawn.savefig(path, metadata=nothing)


if __name__ == "__main__":
    summarise([*map(Path, sys.argv[1:])])
