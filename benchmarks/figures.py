"""Figures of documents, from the measurements in benchmarks/results: one row of JSON a measurement.

    python -m benchmarks.figures            # writes the generated parts of the documents anew
    python -m benchmarks.figures --check    # exit code 1 if one is not current

A generated part is a comment that says how to make it, the table, and a last comment:

    <!-- figures QUESTION
    HEAD | CELL
    ...                                      a column each, CELL a format string of the row
    -->
    (the table, and below it the numbered commands that measured its rows)
    <!-- end of figures -->

CELL is filled with the row's fields, its figures and peaks; what a row lacks leaves a cell empty.
`where FIELD = TEXT` among the columns keeps rows with that value; `no commands` is for tables whose
text has the command. `<!-- figures NAME.table: ... -->` takes the table from benchmarks/results:
there each line is a row of the table, and a cell reads any row, by its question and its subject, or
by "model, subject", "layout, subject" or "options, subject":
`{packed[rag_musique][speedup]:.1f}`. A cell `{commands}` names the programs that measured the rows
of its line. The newest row of each question, subject, model, layout and options counts; older ones
stay in the files.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIELDS = frozenset(
    "question subject model layout options figures peaks machine versions commit command date"
    .split()
)  # fmt: skip
PART = re.compile(r"(<!-- figures\b(.*?)-->\n)(.*?)(<!-- end of figures -->)", re.S)
USUAL = {"torch": ("2.11.0+cu130", "2.13"), "megatron_core": ("0.16.1",)}
"""Versions that docs/results.md names at its head; others stand with their rows."""

REBASED = {"2dd6cad4", "39c7dc6", "7b718fa", "c3b01e4"}
"""Commits that were rebased before they were merged: the history has them under other names."""

Row = Mapping[str, Any]


def read(folder: Path = RESULTS) -> list[Row]:
    """All rows, file by file; within a file later lines are newer on the same day."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            row = json.loads(line)
            if row.keys() != FIELDS:
                raise ValueError(f"{path}:{number}: fields {sorted(FIELDS ^ row.keys())}")
            rows.append(row)
    return rows


def identity(row: Row) -> tuple[str, ...]:
    """What a newer measurement must have in common with an older one to replace it."""
    return tuple(row[name] for name in ("question", "subject", "model", "layout", "options"))


def newest(rows: Iterable[Row]) -> list[Row]:
    """The newest row of each identity, where the first one of it stood."""
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        if identity(row) not in found or row["date"] >= found[identity(row)]["date"]:
            found[identity(row)] = row
    return list(found.values())


class Missing(dict):  # type: ignore[type-arg]
    """Values of a row for a format string."""

    def __missing__(self, name: str) -> Any:
        raise LookupError(name)


def values(row: Row) -> Missing:
    """A row's fields, figures and peaks by name; `{peaks}` is "stock, prefix (predicted)"."""
    peaks = row["peaks"]
    told = [f"{peaks[name]:.1f}" for name in ("stock_gib", "prefix_gib") if name in peaks]
    text = ", ".join(told)
    if "predicted_gib" in peaks:
        text += f" ({peaks['predicted_gib']:.1f})"
    bubble = [row["figures"].get(name) for name in ("bubble", "bubble_simulated")]
    both = f"{bubble[0]:.3f}, {bubble[1]:.3f}" if None not in bubble else ""
    return Missing({**row, **row["figures"], **peaks, "peaks": text, "bubbles": both})


def filled(cell: str, row: Mapping[str, Any]) -> str:
    """A cell of the row; empty if the row lacks a value."""
    try:
        return " ".join(cell.format_map(row).split())
    except LookupError:
        return ""


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    first, *others = (f"| {' | '.join(row)} |\n" for row in [head, *lines])
    return "".join([first, "|---" * len(head) + "|\n", *others])


def of_question(name: str, lines: Sequence[str], rows: Sequence[Row]) -> str:
    """The table of a question, and where its rows were measured."""
    wanted = dict(re.findall(r"^where (\w+) = (.*)$", "\n".join(lines), re.M))
    columns = [line.partition(" | ") for line in lines if " | " in line]
    chosen = [
        row
        for row in map(values, rows)
        if row["question"] == name and all(row.get(key) == text for key, text in wanted.items())
    ]
    if not chosen:
        raise ValueError(f"no row of {name}")
    heads = [head for head, _, _ in columns]
    cells = [[filled(cell, row) for _, _, cell in columns] for row in chosen]
    head, last, sources = sources_of(chosen, "no commands" not in lines)
    if head:
        heads.append(head)
        cells = [[*cell, text] for cell, text in zip(cells, last, strict=True)]
    return f"{table(heads, cells)}\n{sources}"


def sources_of(rows: Sequence[Row], commands: bool) -> tuple[str, list[str], str]:
    """Head and cells of a last column, and below the table the list of what measured the rows: the
    cells are numbers in it. A commit that all rows of an item share is named there, others are
    beside the numbers."""
    places = [source(row, commands) for row in rows]
    commits: dict[str, dict[str, None]] = defaultdict(dict)
    for place, row in zip(places, rows, strict=True):
        commits[place][commit_of(row)] = None
    numbers = {place: f"{number}" for number, place in enumerate(commits, 1)}
    is_numbered, has_several = len(numbers) > 1, any(len(some) > 1 for some in commits.values())
    items = []
    for place, some in commits.items():
        where, colon, command = place.partition(": ")
        number = f"{numbers[place]}: " * is_numbered
        commit = f", commit {next(iter(some))}" if len(some) == 1 else ""
        items.append(f"- {number}{where}{commit}{colon}{command}\n")
    cells = [
        ", ".join([numbers[place]] * is_numbered + [commit_of(row)] * (len(commits[place]) > 1))
        for place, row in zip(places, rows, strict=True)
    ]
    kind = "command" if commands else "run"
    return ", ".join([kind] * is_numbered + ["commit"] * has_several), cells, "".join(items)


def commit_of(row: Row) -> str:
    """A row's commit as the pages name it."""
    return f"{row['commit'] or 'not recorded'}{' (rebased)' * (row['commit'] in REBASED)}"


def source(row: Row, command: bool = True) -> str:
    """Machine, date and versions that are unusual, and behind a colon the command of a row."""
    place = f"{row['machine']}, {row['date']}{unusual(row['versions'])}"
    return place + f": `{row['command']}`" * command


def unusual(versions: Mapping[str, str]) -> str:
    """Versions that are not those of the page's head."""
    told = [
        f"{name.replace('_', '-')} {version}"
        for name, version in versions.items()
        if name in USUAL and version not in USUAL[name]
    ]
    return "".join(f", {text}" for text in told)


class Lookup(dict):  # type: ignore[type-arg]
    """Rows of a question by subject, "model, subject" or "layout, subject"."""

    def __init__(self, rows: Iterable[Row]) -> None:
        super().__init__()
        for row in map(values, rows):
            for name in ("", "model", "layout", "options"):
                key = f"{row[name]}, {row['subject']}" if name else row["subject"]
                self.setdefault(key, row)


def of_all(lines: Sequence[str], rows: Sequence[Row]) -> str:
    """A table whose lines read rows of any question; the first line is its head."""
    by_question = defaultdict(list)
    for row in rows:
        by_question[row["question"]].append(row)
    known = {name: Lookup(some) for name, some in by_question.items()}
    made = []
    for line in lines[1:]:
        asked = re.findall(r"\{(\w+)\[([^\]]*)\]", line)
        programs = dict.fromkeys(program(known[name][key]["command"]) for name, key in asked)
        both = {**known, "commands": ", ".join(programs)}
        made.append([cell.strip().format_map(both) for cell in line.split(" | ")])
    return table([cell.strip() for cell in lines[0].split(" | ")], made)


def program(command: str) -> str:
    """The script, module or verb that a command runs; "..." stands for its arguments."""
    words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
    length = words.index("-m") + 2 if "-m" in words else 2
    more = " ..." * (len(words) > length or len(words) < len(shlex.split(command)))
    return f"`{' '.join(words[:length])}{more}`"


def written(text: str, rows: Sequence[Row]) -> str:
    """A document with its generated parts made anew."""

    def part(found: re.Match[str]) -> str:
        first, *lines = found[2].rstrip("\n").split("\n")
        name = first.strip().partition(":")[0]
        if name.endswith(".table"):
            made = of_all((RESULTS / name).read_text(encoding="utf-8").splitlines(), rows)
        else:
            made = of_question(name, lines, rows)
        return f"{found[1]}{made}{found[4]}"

    return PART.sub(part, text)


def documents() -> list[Path]:
    """Documents with generated parts."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in pages if "<!-- figures" in path.read_text(encoding="utf-8")]


def main(argv: Sequence[str] | None = None) -> int:
    """Writes or checks the documents."""
    rows, stale = newest(read()), []
    for path in documents():
        text = path.read_text(encoding="utf-8")
        made = written(text, rows)
        if made != text:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in (sys.argv[1:] if argv is None else argv):
                path.write_text(made, encoding="utf-8")
    print(*stale, sep="\n", end="\n" if stale else "")
    return int(bool(stale) and "--check" in (sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
