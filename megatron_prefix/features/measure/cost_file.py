"""Measurements of several models, layouts and devices in one JSON file.  Pure.

{"format": "megatron_prefix costs", "version": 2, "measured": {KEY: {..., "bytes": [...]}}} with the
keys that `cost_meter.py` makes, `Evidence.to_json` of each, and [shared, stage, *StageBytes] of
every stage. Several jobs may share a file: what others wrote in the meantime stays, and of two that
write at once the last one wins.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_prefix.errors import UserError
from megatron_prefix.features.measure.cost_fit import Evidence
from megatron_prefix.plan.files import read_whole, write_text, writing
from megatron_prefix.plan.sizes import StageBytes, StagesBytes

FORMAT, VERSION = "megatron_prefix costs", 2
_FIX = "name another file, or move this one away to measure again"


@dataclass(frozen=True)
class Measured:
    """Of one model, layout and device: what work takes, and bytes of memory."""

    times: Evidence = field(default_factory=Evidence)
    num_bytes: StagesBytes = field(default_factory=lambda: {False: {}, True: {}})

    def to_json(self) -> dict[str, Any]:
        """Plain sequences and numbers; `from_json` reads them."""
        rows = [(s, stage, *n) for s, of in self.num_bytes.items() for stage, n in of.items()]
        return self.times.to_json() | {"bytes": rows}

    @classmethod
    def from_json(cls, values: Any) -> Measured:
        """The inverse of `to_json`; a file of before has no bytes.

        Raises:
            ValueError: not what `to_json` makes.
        """
        times, numbers = Evidence.from_json(values), cls().num_bytes
        try:
            for share, stage, *row in values.get("bytes", ()):
                numbers[bool(share)][int(stage)] = StageBytes(*map(float, row))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"no measured bytes ({error})") from None
        every = [number for of in numbers.values() for row in of.values() for number in row]
        if not all(0 <= number < math.inf for number in every):
            raise ValueError("measured bytes that are not finite numbers from 0")
        return cls(times, numbers)


def read_costs(path: str) -> dict[str, Measured]:
    """What a file has, by key; nothing where it is missing or empty.

    A damaged file is refused and not overwritten: it may be the user's, and another one.

    Raises:
        UserError: unreadable, or no file of measurements.
    """
    try:
        text = read_whole(path)
        if not os.path.isfile(path):
            raise OSError("a device or a pipe")  # it is written, too
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read ({why}); {_FIX}") from None
    if not text.strip():
        return {}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise UserError(f"{path}: no file of measured costs; {_FIX}")
    if values.get("version") in range(VERSION):  # other features: they are measured again
        return {}
    if values.get("version") != VERSION:
        raise UserError(f"{path}: measured costs of another version than {VERSION}; {_FIX}")
    try:
        return {key: Measured.from_json(entry) for key, entry in values["measured"].items()}
    except (ValueError, AttributeError, KeyError) as error:
        raise UserError(f"{path}: damaged ({error}); {_FIX}") from None


def write_costs(path: str, key: str, measured: Measured) -> None:
    """Writes what was measured under a key, beside what the file has under others; whole or not
    at all.

    Raises:
        UserError: see `read_costs`; the file cannot be written.
    """
    entries = {**read_costs(path), key: measured}
    values = {
        "format": FORMAT, "version": VERSION,
        "measured": {name: entry.to_json() for name, entry in sorted(entries.items())},
    }  # fmt: skip
    with writing(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(values, allow_nan=False) + "\n")
