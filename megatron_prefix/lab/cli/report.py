"""What verbs print: results on stdout, as one JSON object or as tables of templates.

rich is imported where it is used: `--help` and `--json` do without it.
"""

from __future__ import annotations

import json
import math
import os
import string
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, Literal

FILE_COLUMNS = 120
"""Width of tables that go to a file."""


def to_json(result: Any) -> str:
    """A JSON object of mappings, dataclasses and lists; NaN and infinity, which JSON lacks, are
    null."""
    return json.dumps(finite(result), indent=2, allow_nan=False)


def to_line(result: Any) -> str:
    """`to_json` in one line."""
    return json.dumps(finite(result), allow_nan=False)


def print_json(result: Any) -> None:
    """Prints `to_json`."""
    print(to_json(result))


def finite(value: Any) -> Any:
    """The value with dataclasses as mappings, and null instead of every NaN and infinity."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# Templates ----------------------------------------------------------------------------------------


class _Unknown(Exception):
    """A template needs a value that is None."""


class _Formatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            raise _Unknown
        return (
            number(value) if format_spec == "n" else str(super().format_field(value, format_spec))
        )


def filled(template: str, values: Mapping[str, Any]) -> str | None:
    """A template of `str.format` with its values; None if a value is. `{x:n}` is `number(x)`."""
    try:
        return _Formatter().vformat(template, (), values)
    except _Unknown:
        return None


def facts(templates: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, str]:
    """The rows of a table: labels and filled templates. What has no value has no row.

    Args:
        templates: by label; see `filled`. A label may be a template, too.
        values: by name: the fields of a result, and what is made of them.
    """
    rows = {filled(label, values): filled(text, values) for label, text in templates.items()}
    return {label: text for label, text in rows.items() if label is not None and text is not None}


def number(value: float) -> str:
    """A count for people: 12,345 or 1,234.5."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def counted(num: int, word: str) -> str:
    """A count with its word for people: 1 group, 2 groups."""
    return f"{num:,} {word}{'' if num == 1 else 's'}"


DIFFERENCES = {
    "largest difference of a loss": "loss_max_abs_diff",
    "of a log-prob": "logprob_max_abs_diff",
    "of a gradient, relative": "grad_max_rel_diff",
    "of a parameter after AdamW": "param_max_abs_diff",
}


def differences(result: Any) -> dict[str, str]:
    """Rows of a table: how far the schedules are apart, each quantity with its own limit.

    Args:
        result: an Alignment, or the Summary of a run that compared. Limits are None in 16 bit.
    """
    from megatron_prefix.lab.numerics.compare import LIMIT_OF

    told = "" if result.loss_limit is None else " (at most {%s:.2e})"
    templates = {
        label: f"{{{name}:.2e}}{told and told % LIMIT_OF[name]}"
        for label, name in DIFFERENCES.items()
        if hasattr(result, name)
    }
    return facts(templates, vars(result))


# Tables -------------------------------------------------------------------------------------------


def print_facts(title: str, rows: Mapping[str, str], *, stderr: bool = False) -> None:
    """Prints a table of names and values for people."""
    print_table(title, None, rows.items(), left=1, stderr=stderr)


def print_records(
    title: str,
    columns: Sequence[tuple[str, str]],
    records: Iterable[Mapping[str, Any]],
    *,
    wrap: bool = True,
    stderr: bool = False,
) -> None:
    """Prints a table with a row per record.

    Args:
        title: above it.
        columns: heading and template of each column; a cell is empty if its value is None.
        records: values by name.
        wrap: whether cells may take several lines.
        stderr: where to print.
    """
    rows = ([filled(cell, record) or "" for _, cell in columns] for record in records)
    unwrapped = 0 if wrap else len(columns)
    head = [heading for heading, _ in columns]
    print_table(title, head, rows, unwrapped=unwrapped, stderr=stderr)


def print_table(
    title: str,
    headings: Sequence[str] | None,
    rows: Iterable[Iterable[str]],
    *,
    left: int = 0,
    unwrapped: int = 0,
    stderr: bool = False,
) -> None:
    """Prints a table in the one style of all verbs, or nothing if it has no rows.

    Args:
        title: above it.
        headings: of the columns; None: two without any.
        rows: their cells.
        left: number of columns that are aligned to the left, the others to the right.
        unwrapped: number of columns, from the left, whose cells keep to one line.
        stderr: where to print.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE,
        show_header=headings is not None,
    )  # fmt: skip
    for place, heading in enumerate(headings or ("", "")):
        justify: Literal["left", "right"] = "left" if place < left else "right"
        # A long identifier takes two lines: with an ellipsis it could not be searched for.
        overflow: Literal["ellipsis", "fold"] = "ellipsis" if place < unwrapped else "fold"
        table.add_column(heading, justify=justify, overflow=overflow, no_wrap=place < unwrapped)
    for row in rows:
        table.add_row(*map(escape, row))
    if table.row_count:
        print_rich(table, stderr=stderr)


def print_rich(*things: Any, stderr: bool = False) -> None:
    """Prints what rich can draw, one below the other, without colours if it is not a terminal."""
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with 1, our code for a failed check
            raise BrokenPipeError

    stream = sys.stderr if stderr else sys.stdout
    # rich takes 80 columns for a file, and would cut numbers of our wider tables.
    width = None if stream.isatty() or "COLUMNS" in os.environ else FILE_COLUMNS
    Quiet(stderr=stderr, highlight=False, width=width).print(*things, sep="\n")
