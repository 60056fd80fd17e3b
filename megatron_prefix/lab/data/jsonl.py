"""Reads and writes JSON lines: streamed, plain or gzip; one-line errors name file, row and field.

A row is a line of the file; rows count from 1, and blank lines count, too. Code that reads a field
raises `Fault(field, text)`; `at_row` turns it into the `UserError` that the user sees:
`FILE:ROW: FIELD: what is wrong (value); how to fix`.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from megatron_prefix.errors import UserError, shown
from megatron_prefix.plan.files import PathLike, opened, replacing

Row = dict[str, Any]
_GZIP_MAGIC = b"\x1f\x8b"
_MOST_BYTES = 1 << 28  # of a row


class Fault(Exception):
    """A bad field of a row; the reader adds file and row."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(f"{field}: {text}")


def user_error(place: str, fault: object) -> UserError:
    """The one-line `UserError` at `place` (a file, or `FILE:ROW`)."""
    return UserError(" ".join(f"{place}: {fault}".splitlines()))


@contextlib.contextmanager
def at_row(path: PathLike, number: int) -> Iterator[None]:
    """Turn a `Fault`, or endless nesting, inside into a `UserError` that names file and row."""
    try:
        yield
    except Fault as fault:
        raise user_error(f"{os.fspath(path)}:{number}", fault) from None
    except RecursionError:
        text = "row: nested too deeply (over 900 levels); write it flatter"
        raise user_error(f"{os.fspath(path)}:{number}", text) from None


# Reading ------------------------------------------------------------------------------------------


def read_rows(path: PathLike) -> Iterator[tuple[int, Row]]:
    """Yield (row number, object) of a JSON lines file; gzip is recognised by its first bytes.

    Errors: `UserError` for a file that is missing, unreadable, empty, not UTF-8, truncated or
    corrupt, and for a row that is not one JSON object.
    """
    number, any_row = 0, False
    try:
        with opened(path) as raw:
            file = _unpacked(raw)
            lines = iter(lambda: file.readline(_MOST_BYTES + 1), b"")
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    any_row = True
                    with at_row(path, number):
                        row = _parsed(line)
                    yield number, row
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        text = f"gzip: truncated or corrupt ({error}); copy or write the file again"
        raise user_error(f"{os.fspath(path)}:{number + 1}", text) from None
    except OSError as error:
        text = f"cannot be read ({error.strerror or error}); check path and permissions"
        raise user_error(os.fspath(path), text) from None
    if not any_row:
        text = "row: the file is empty (0 rows); write at least one rollout a line"
        raise user_error(f"{os.fspath(path)}:1", text)


def _unpacked(raw: io.BufferedReader) -> BinaryIO:
    start = raw.peek(len(_GZIP_MAGIC))[: len(_GZIP_MAGIC)]  # a pipe cannot be read twice
    return cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if start == _GZIP_MAGIC else raw


def _parsed(line: bytes) -> Row:
    if len(line) > _MOST_BYTES:
        raise Fault("row", f"longer than {_MOST_BYTES >> 20} MiB; write one JSON object a line")
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        text = f"not UTF-8 (byte {error.start} is {line[error.start]:#04x}); save the file as UTF-8"
        raise Fault("row", text) from None
    except (ValueError, RecursionError) as error:
        raise Fault("row", f"not JSON ({error}); write one JSON object per line") from None
    if not isinstance(row, dict):
        text = f"not an object ({shown(row)}); write one JSON object per line"
        raise Fault("row", text)
    return row


# Fields of a row ----------------------------------------------------------------------------------


def required(row: Row, field: str) -> Any:
    """The value of `field`; `Fault` when the row lacks it."""
    if field not in row:
        raise Fault(field, f"missing (the row has {shown(sorted(row), 80)}); add it to every row")
    return row[field]


def name(row: Row, field: str) -> str:
    """A string or an integer, as a string."""
    value = required(row, field)
    if type(value) not in (str, int) or value == "":
        raise Fault(field, f"not a name ({shown(value)}); give a non-empty string or an integer")
    check_characters(field, value)
    return str(value)


def text(row: Row, field: str) -> str:
    """A string, which may be empty."""
    value = required(row, field)
    if not isinstance(value, str):
        raise Fault(field, f"not a string ({shown(value)}); give the text itself")
    check_characters(field, value)
    return value


def check_characters(field: str, value: Any, place: str = "") -> None:
    """`Fault` for a string, at any depth of a JSON value, that UTF-8 cannot hold.

    JSON has an emoji as a pair of escapes; half of a pair, as truncated texts have it, is nothing.
    """
    values = [value]
    while values:
        part = values.pop()
        if isinstance(part, dict):
            values += [*part, *part.values()]
        elif isinstance(part, list):
            values += part
        elif isinstance(part, str):
            try:
                part.encode("utf-8")
            except UnicodeEncodeError as error:
                text = f"character {error.start} is half a surrogate pair"
                letter = shown(part[error.start])
                fix = "cut texts between characters, or write U+FFFD for it"
                raise Fault(field, f"{place}{text} ({letter}); {fix}") from None


def flag(row: Row, field: str, default: bool) -> bool:
    """true or false, also as 1 or 0; `default` if it is null or missing."""
    value = row.get(field)
    if value is None:
        return default
    if not _is_flag(value):
        raise Fault(field, f"not true or false ({shown(value)}); give one of these")
    return bool(value)


def flags(row: Row, field: str) -> NDArray[np.bool_]:
    """A list of true and false, also as 1 and 0, or 1.0 and 0.0, as bool [n]."""
    values = _list(row, field)
    for index, value in enumerate(values):
        if not _is_flag(value):
            text = f"holds values other than 0 and 1 (entry {index} is {shown(value)})"
            raise Fault(field, f"{text}; give 1 for each token that counts")
    return np.array(values, dtype=np.float64) != 0


def _is_flag(value: Any) -> bool:
    return isinstance(value, int | float) and value in (0, 1)


def embedded(value: Any) -> Any:
    """What JSON in a string holds, or any other value as it is; ValueError if it is no JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except RecursionError:
        raise ValueError("nested too deeply") from None


def integer(row: Row, field: str) -> int:
    """An integer; true and false are none."""
    value = required(row, field)
    if type(value) is not int:
        raise Fault(field, f"not an integer ({shown(value)}); give one without quotes")
    return value


def integers(row: Row, field: str) -> NDArray[np.int64]:
    """A list of integers (true and false are none) as int64 [n]."""
    values = _list(row, field)
    if not set(map(type, values)) <= {int}:
        index = next(i for i, value in enumerate(values) if type(value) is not int)
        text = f"entry {index} is not an integer ({shown(values[index])}); give token ids"
        raise Fault(field, text)
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        largest = max(values, key=abs)
        text = f"holds an integer beyond 64 bits ({shown(largest)}); give token ids"
        raise Fault(field, text) from None


def number(row: Row, field: str) -> float:
    """A finite number; true and false are not."""
    value = required(row, field)
    if type(value) not in (int, float):
        raise Fault(field, f"not a number ({shown(value)}); give a finite number")
    if not _finite(value):
        raise Fault(field, f"not finite ({shown(value)}); give a finite number")
    return float(value)


def numbers(row: Row, field: str) -> NDArray[np.float64]:
    """A list of finite numbers as float64 [n]."""
    values = _list(row, field)
    for index, value in enumerate(values):
        if type(value) not in (int, float) or not _finite(value):
            text = f"entry {index} is not a finite number ({shown(value)}); give finite numbers"
            raise Fault(field, text)
    return np.array(values, dtype=np.float64)


def _list(row: Row, field: str) -> list[Any]:
    values = required(row, field)
    if not isinstance(values, list):
        raise Fault(field, f"not a list ({shown(values)}); give a JSON list")
    return values


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of float64
        return False


# Writing ------------------------------------------------------------------------------------------


def write_lines(path: PathLike, lines: Iterable[str]) -> None:
    """Write `lines` to `path` (gzip when its name ends in .gz); none at all is a `UserError`.

    All or nothing: the lines go to a temporary file in the same folder that then takes the place of
    `path`, so an exception in `lines` leaves what was there. Equal lines give equal bytes.
    """
    with replacing(path) as raw:
        count = _write(raw, lines, packed=Path(path).suffix == ".gz")
        if count == 0:
            raise UserError(f"{path}: nothing to write (0 rows); give at least one rollout")


def _write(raw: BinaryIO, lines: Iterable[str], *, packed: bool) -> int:
    count = 0
    with contextlib.ExitStack() as stack:
        out: Any = raw
        if packed:  # no name and no time in the header: equal lines give equal bytes
            out = stack.enter_context(gzip.GzipFile("", "wb", fileobj=raw, mtime=0))
        for line in lines:
            out.write(line.encode("utf-8") + b"\n")
            count += 1
    return count
