"""`train.json` of a checkpoint, and errors about damaged files."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.checkpoint.api import CheckpointException

from megatron_prefix.errors import UserError
from megatron_prefix.lab.rl.run_folder import STATE
from megatron_prefix.plan.files import opened

FORMAT = 1


class CheckpointError(UserError):
    """A file of a checkpoint that cannot be used, and what to do."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {' '.join(why.split())[:200]}; resume from another checkpoint")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns any error of a reader into one about the file; junk can fail in many ways.

    Raises:
        UserError: naming the file.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001
        raise CheckpointError(path, f"cannot be read ({reason(error)})") from None


def opened_file(path: Path) -> BinaryIO:
    """A file of a checkpoint to read; close it.

    Raises:
        OSError: it cannot be opened, or is a pipe or a device, which might have no end.
    """
    file = opened(path)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is a pipe or a device")
    return file


def reason(error: BaseException) -> str:
    """An error's first line; torch's text about a pickle continues with advice to trust it."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, pickle.UnpicklingError) and "Weights only" in str(error):
        return "holds more than tensors and plain values"
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return text.splitlines()[0]


@dataclass(frozen=True)
class State:
    """The content of `train.json`.

    Attributes:
        step, position, skipped, skipped_in_a_row: of the Trainer.
        world_size: ranks of the job.
        identity: see checkpoint.Identity.
        settings: fields of the TrainSettings.
        unknown: names that this release does not know.
    """

    step: int
    position: int
    skipped: int
    skipped_in_a_row: int
    world_size: int
    identity: dict[str, Any]
    settings: dict[str, Any]
    unknown: tuple[str, ...] = ()

    def as_json(self) -> str:
        """The file's text; `read_state` is the inverse."""
        fields = {name: value for name, value in vars(self).items() if name != "unknown"}
        return json.dumps({"format": FORMAT, **fields}, indent=2) + "\n"


def read_state(checkpoint: Path) -> State:
    """Reads and checks a checkpoint's `train.json`.

    Raises:
        UserError: unreadable, of another format, or a value that cannot be.
    """
    path = checkpoint / STATE
    entries = read_json(path)
    version = entries.pop("format", None)
    if type(version) is not int or version != FORMAT:
        raise UserError(
            f"{path}: format {str(version)[:40]}, and this release reads {FORMAT}; resume with the"
            " release that wrote it"
        )
    values: dict[str, Any] = {}
    for name in ("step", "position", "skipped", "skipped_in_a_row", "world_size"):
        value = values[name] = entries.pop(name, None)
        if type(value) is not int or value < (name == "world_size"):
            raise CheckpointError(path, f"{name} is {str(value)[:40]}, not a number of any run")
    for name in ("identity", "settings"):
        value = values[name] = entries.pop(name, None)
        if not isinstance(value, dict):
            raise CheckpointError(path, f"{name} is missing, or no JSON object")
    return State(**values, unknown=tuple(entries))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a small file.

    Raises:
        UserError: there is none.
    """
    with reading(path), opened_file(path) as file:
        value = json.loads(file.read().decode("utf-8"))
    if not isinstance(value, dict):
        raise CheckpointError(path, "holds no JSON object")
    return value
