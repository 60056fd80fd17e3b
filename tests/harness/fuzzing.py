"""Files with one thing changed, and the one rule for what a command makes of them.

A seed names a case, so a case that fails can be run again by itself.
"""

import copy
import io
import json
import logging
import os
import time

from tests.harness.command_line import captured

ODD_VALUES = (
    None, True, False, -1, -5, 0, 1, 0.5, 1e300, float("nan"), float("inf"), 10**9, 2**31, 2**63,
    10**300, "", "x", "\x00", "é" * 50, [], {}, [[]], [None], {"": None}, "1", "../..",
)  # fmt: skip
ODD_NUMBERS = ("", "-1", "0", "1", "7", "999999999", str(2**31), "9" * 300, "9" * 5000, "x", "1.5")
MOST_SECONDS = 5.0
"""No small file keeps the processor busy for longer."""


def rounds(few, many):
    """How often something random is tried: `few` times, `many` with HYPOTHESIS_PROFILE=search."""
    return many if os.environ.get("HYPOTHESIS_PROFILE") == "search" else few


def changed_bytes(rng, content):
    """Bytes that were cut, emptied, overwritten, doubled or flipped."""
    at, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    junk = rng.randbytes(rng.choice((1, 4, 100)))
    return rng.choice(
        (
            content[:at], content[at:], b"", junk, content[:at] + junk + content[at + len(junk) :],
            content[:at] + junk + content[at:], content[:at] + content[end:],
            content[:end] + content[at:], content[:at] + bytes(end - at) + content[end:],
            _flipped(content, at),
        )
    )  # fmt: skip


def _flipped(content, at):
    byte = content[at : at + 1]
    return content[:at] + bytes(b ^ 1 << at % 8 for b in byte) + content[at + 1 :]


def changed_json(rng, value):
    """A JSON value with one part replaced, dropped, or added."""
    value = copy.deepcopy(value)
    place, key = rng.choice(list(_places(value)))
    kind = rng.randrange(4)
    if kind == 0:
        del place[key]
    elif kind == 1 and isinstance(place, dict):
        place["unknown"] = rng.choice(ODD_VALUES)
    else:
        place[key] = copy.deepcopy(rng.choice(ODD_VALUES))
    return value


def _places(value):
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in pairs:
        yield value, key
        if isinstance(part, dict | list):
            yield from _places(part)


def changed_json_lines(rng, text):
    """Lines of JSON, one of them changed as JSON or as text."""
    lines = text.splitlines()
    number = rng.randrange(len(lines))
    kind = rng.randrange(4)
    if kind == 0:
        return changed_bytes(rng, text.encode())
    if kind == 1:
        lines.insert(rng.randrange(len(lines)), lines[number])
    elif kind == 2:
        lines[number] = json.dumps(rng.choice(ODD_VALUES))
    else:
        lines[number] = json.dumps(changed_json(rng, json.loads(lines[number])))
    return "\n".join(lines).encode()


def changed_cells(rng, text):
    """A CSV with one cell or line changed, moved, doubled or dropped."""
    lines = [line.split(",") for line in text.splitlines()]
    line, kind = rng.choice(lines), rng.randrange(8)
    if rng.randrange(5) == 0:  # a number that the head of the file announces
        line, kind = lines[1], 7
    cell = rng.randrange(1, len(line)) if len(line) > 1 else 0
    if kind == 0:
        return changed_bytes(rng, text.encode())
    if kind == 1:
        line.pop(cell)
    elif kind == 2:
        line.insert(cell, rng.choice(line))
    elif kind == 3:
        other = rng.choice(lines)
        there = rng.randrange(len(other))
        line[cell], other[there] = other[there], line[cell]
    elif kind == 4:
        lines.remove(line)
    elif kind == 5:
        lines.insert(rng.randrange(len(lines)), list(line))
    else:
        line[cell] = _changed_number(rng, line[cell])
    return "\n".join(map(",".join, lines)).encode()


def _changed_number(rng, cell):
    digits = [place for place, letter in enumerate(cell) if letter.isdigit()]
    if not digits:
        return rng.choice(ODD_NUMBERS)
    begin = end = rng.choice(digits)
    while begin and cell[begin - 1].isdigit():
        begin -= 1
    while end < len(cell) and cell[end].isdigit():
        end += 1
    return cell[:begin] + rng.choice(ODD_NUMBERS) + cell[end:]


def ended(*arguments):
    """Exit code of a command in this process, and what it wrote to stderr, logged warnings too."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)  # pytest takes what the logging module would print
    handler.setLevel(logging.WARNING)
    handler.addFilter(logging.Filter("megatron_prefix"))
    logging.getLogger().addHandler(handler)
    try:
        code, _, err = captured(*arguments)
    finally:
        logging.getLogger().removeHandler(handler)
    return code, log.getvalue() + err


def fault(*arguments):
    """What is wrong with how a command ends; "" where it succeeds or is refused in one line."""
    begin = time.process_time()
    try:
        code, text = ended(*arguments)
    except BaseException as error:  # noqa: BLE001  # whatever it is, it is a traceback
        return f"{type(error).__name__}: {str(error)[:300]}"
    seconds = time.process_time() - begin
    if code == 2 and not (text.count("\n") == 1 and text.endswith("\n") and len(text) < 600):
        return f"not one short line: {text[:600]!r}"
    if code not in (0, 2):
        return f"exit code {code}: {text[:300]!r}"
    return f"{seconds:.1f} s" if seconds > MOST_SECONDS else ""
