"""Prints what other documents published next to what was measured here, as tables in Markdown.

    python -m benchmarks.documents FOLDER...

FOLDER has results of `megatron-prefix bench --bench-json` (benchmarks/documents_h200.sh, and any
other: rows are found by model and name) and of `benchmarks.peers --json`, in any files *.json.
Their figures are quoted from the documents that docs/results.md names. Rows that were not measured
are left out, and named on stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = Mapping[str, Any]


class Wanted(NamedTuple):
    """One row of a table.

    Attributes:
        what: what the row is called.
        theirs: the figure that was published; "" if there is none.
        name: of the row in a result.
        model: `bench --model`.
        log_probs: whether passes without gradients were timed.
    """

    what: str
    theirs: str
    name: str
    model: str = "qwen3-8b"
    log_probs: bool = False


class Table(NamedTuple):
    """A table: its title, its columns (see COLUMNS), and its rows."""

    title: str
    columns: str
    rows: tuple[Wanted, ...]


LLAMA, MOE = "llama3-8b", "qwen3-30b-a3b"
SPLITS = ("2048:10240", "6144:6144", "8192:4096", "10240:2048")
GRID = [f"{split}:{num}" for split in SPLITS for num in (4, 8, 16)]
TABLES = (
    Table(
        "Schedule-level reuse, tables 4 and 5",
        "segment,speedup,bound,share,times,phases,mfu",
        tuple(Wanted(name, "", name, LLAMA) for name in GRID),
    ),
    Table(
        "AReaL-DTA, figure 5 and table 3",
        "compression,speedup,bound,share,rate,mfu",
        (
            Wanted("model calls of agents (tau2_mixed)", "8.31x, C 9.43", "tau2_calls.jsonl.gz"),
            Wanted("1,600 tokens, P 512, n 16", "0.58x, C 1.42", "512:1088:16"),
            Wanted("1,800 tokens, P 176, n 8", "0.62x, C 1.09", "176:1624:8"),
        ),
    ),
    Table(
        "DualKV, table 2: a decoder layer",
        "per layer,speedup,bound,share",
        (
            Wanted("P 5,059, 32 responses", "597, 180 ms: 3.32x", "5059_32.jsonl.gz"),
            Wanted("P 8,192, 16 responses", "549, 128 ms: 4.28x", "8192_16.jsonl.gz"),
            Wanted("P 16,384, 8 responses", "553, 125 ms: 4.41x", "16384_8.jsonl.gz"),
            Wanted("P 32,768, 4 responses", "810, 246 ms: 3.29x", "32768_4.jsonl.gz"),
        ),
    ),
    Table(
        "DualKV, tables 3, 4 and 10: passes for log-probs, and updates",
        "layers,speedup,bound,share,times,mfu",
        (
            Wanted("log-probs, 8 responses", "2.43x", "8192:2048:8", log_probs=True),
            Wanted("log-probs, 32 responses", "", "8192:2048:32", log_probs=True),
            Wanted("P 10,240, R 2,048, log-probs, 8", "", "10240:2048:8", LLAMA, True),
            Wanted("update, 8 responses", "2.47x, MFU 0.774", "8192:2048:8"),
            Wanted("update, 32 responses", "", "8192:2048:32"),
            Wanted("MoE, log-probs, 8", "3.45x, 3.58x", "8192:2048:8", MOE, True),
            Wanted("MoE, update, 8", "3.82x", "8192:2048:8", MOE),
        ),
    ),
    Table(
        "Train-time prompt caching",
        "model,layers,speedup,bound,share,times",
        (
            Wanted("16,384, 64, n 9", "7.5x", "16384:64:9", LLAMA),
            Wanted("16,384, 128, n 9", "7.3x", "16384:128:9"),
            Wanted("16,384, 1,024, n 9", "5.4x", "16384:1024:9"),
            Wanted("8,192, 4,096, n 9", "1.7x", "8192:4096:9", LLAMA),
            Wanted("1,000, 100, n 8", "4.9 times the tokens", "1000:100:8"),
        ),
    ),
)  # fmt: skip
ATTENTION = {  # DualKV, table 1: shape -> FlashAttention-2 on copies and DualKV, ms; FLOP ratio
    "28x4096x2048": ("172.2, 104.2 ms: 1.65x", 1.75),
    "28x16384x2048": ("1,441.0, 371.7 ms: 3.88x", 4.2),
    "16x32768x2048": ("2,883.4, 525.8 ms: 5.48x", 5.9),
}


def _layers(row: Row) -> str:
    found = [text.partition("=")[2] for text in row["set"] if text.startswith("num_layers=")]
    return found[-1] if found else "all"


def _per_layer(row: Row) -> str:
    times = (row[name] / int(_layers(row)) for name in ("stock_ms", "prefix_ms"))
    return ", ".join(f"{ms:.0f}" for ms in times) + " ms"


def _rates(row: Row) -> str:
    """Thousands of tokens a second of both schedules, tokens without sharing."""
    spent = (sum(row[name]) for name in ("stock_step_ms", "prefix_step_ms"))
    return ", ".join(f"{row['raw_tokens'] / ms:.1f}" for ms in spent)


def _phases(row: Row) -> str:
    return ", ".join(f"{row['phase_ms'][phase]:,.0f}" for phase in "ABC") if row["phase_ms"] else ""


COLUMNS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "segment": ("segments", lambda row: f"{row['segment_tokens']:,}"),
    "model": ("model", lambda row: str(row["model"])),
    "layers": ("layers", _layers),
    "compression": ("C", lambda row: f"{row['raw_tokens'] / row['executed_tokens']:.2f}"),
    "speedup": ("ours", lambda row: f"{row['speedup']:.2f}x"),
    "bound": ("FLOP bound", lambda row: f"{row['bound']:.2f}x"),
    "share": ("of bound", lambda row: f"{row['of_bound']:.3f}"),
    "times": ("stock, prefix", lambda row: f"{row['stock_ms']:,.0f}, {row['prefix_ms']:,.0f} ms"),
    "per layer": ("a layer: stock, prefix", _per_layer),
    "phases": ("A, B, C, ms", _phases),
    "rate": ("k tokens/s: stock, prefix", _rates),
    "mfu": ("MFU", lambda row: f"{row['mfu']:.3f}" if row["mfu"] else ""),
}


def read(folders: Sequence[str]) -> tuple[list[Row], list[Row]]:
    """Rows of `bench` on one rank, with what their files say of the model; rows of peers."""
    ours: list[Row] = []
    peers: list[Row] = []
    for path in sorted(path for folder in folders for path in Path(folder).glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(result, dict):
            continue
        rows = result.get("rows", [])
        peers += [row for row in rows if {"peer", "shape"} <= row.keys()]
        if any(size > 1 for name, size in result.get("layout", {}).items() if len(name) == 2):
            continue
        common = {name: result.get(name) for name in ("model", "set", "forward_only")}
        ours += [{**common, **row} for row in rows if "speedup" in row]
    return ours, peers


def table(wanted: Table, rows: Sequence[Row], missing: list[str]) -> Iterator[str]:
    """The lines of a table; nothing if none of its rows was measured."""
    columns = [COLUMNS[name] for name in wanted.columns.split(",")]
    cells = []
    for one in wanted.rows:
        key = (one.name, one.model, one.log_probs)
        found = [row for row in rows if (row["name"], row["model"], row["forward_only"]) == key]
        if not found:
            missing.append(f"{wanted.title}: {one.what}")
        cells += [[one.what, one.theirs, *(show(row) for _, show in columns)] for row in found]
    heads = ["", "theirs", *(head for head, _ in columns)]
    if not any(one.theirs for one in wanted.rows):
        heads, cells = [heads[0], *heads[2:]], [[line[0], *line[2:]] for line in cells]
    yield from _lines(wanted.title, heads, cells)


def attention(peers: Sequence[Row], missing: list[str]) -> Iterator[str]:
    """DualKV's first table: attention alone, ours next to the fastest dense kernel's copies."""
    cells = []
    for shape, (theirs, ratio) in ATTENTION.items():
        times = {row["peer"]: row["total_ms"] for row in peers if row["shape"] == shape}
        known = {name: ms for name, ms in times.items() if ms is not None}
        dense = {name: ms for name, ms in known.items() if name.startswith("dense-")}
        if "ours" not in known or not dense:
            missing.append(f"DualKV, table 1: {shape}")
            continue
        best = min(dense, key=lambda name: dense[name])
        ms = known["ours"]
        speedup = f"{dense[best] / ms:.2f}x"
        flex = f"{known['flex'] / ms:.2f}x" if "flex" in known else ""
        cells.append([shape, theirs, f"{dense[best]:.1f} ({best[6:]}), {ms:.1f} ms", speedup,
                      f"{ratio}", flex])  # fmt: skip
    heads = "N x P x R|theirs|fastest copies, ours|ours|FLOP ratio|over FlexAttention's graph"
    yield from _lines("DualKV, table 1: attention alone", heads.split("|"), cells)


def _lines(title: str, heads: Sequence[str], cells: Sequence[Sequence[str]]) -> Iterator[str]:
    if cells:
        yield from (f"**{title}**", "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|")
        yield from ("| " + " | ".join(line) + " |" for line in cells)
        yield ""


def main(folders: Sequence[str]) -> int:
    """Prints the tables of the results in the folders."""
    if not folders:
        print("give one folder or several with JSON results", file=sys.stderr)
        return 2
    absent = [folder for folder in folders if not Path(folder).is_dir()]
    if absent:
        print(f"{absent[0]}: no such folder", file=sys.stderr)
        return 2
    rows, peers = read(folders)
    missing: list[str] = []
    lines = [line for wanted in TABLES for line in table(wanted, rows, missing)]
    print("\n".join([*lines, *attention(peers, missing)]))
    for one in missing:
        print(f"not measured: {one}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
