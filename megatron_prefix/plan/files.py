"""Small files that are read whole, and files that are written whole or not at all.  [pure]"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatron_prefix.errors import UserError

PathLike = str | os.PathLike[str]

MOST_BYTES = 1 << 26
"""Of a file that is read whole: a device has no end."""


def read_whole(path: PathLike) -> bytes:
    """The content of a small file, or of a pipe, which is empty where nobody writes into it.

    Raises:
        OSError: it cannot be read, or holds more than `MOST_BYTES`.
    """
    with opened(path) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"more than {MOST_BYTES >> 20} MiB", os.fspath(path))
    return content


def read_text(path: PathLike) -> str:
    """The same as text in UTF-8 (else UnicodeDecodeError), with its line ends as they are."""
    return read_whole(path).decode("utf-8")


def opened(path: PathLike) -> io.BufferedReader:
    """A file to read, opened without waiting for who writes into a pipe; close it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "rb")


@contextlib.contextmanager
def writing(path: PathLike) -> Iterator[None]:
    """Turns an operating system's refusal to write into one line.

    Raises:
        UserError: naming `path`, or the file that the system names.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"{os.fspath(path)}: cannot be written ({reason}); check the folder and the space left"
        ) from None


@contextlib.contextmanager
def replacing(path: PathLike) -> Iterator[BinaryIO]:
    """Opens a new file that takes the place of `path` when the block ends without an error.

    Until then what was there stays. Links are followed; a pipe or a device is written directly.
    Raises a UserError, as all below.
    """
    with writing(path):
        target = Path(os.path.realpath(path))
        if target.exists() and not (target.is_file() or target.is_dir()):
            with open(target, "wb") as file:
                yield file
            return
        part = target.with_name(f".{secrets.token_hex(8)}.part")
        try:
            with open(part, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        finally:
            with contextlib.suppress(OSError):
                part.unlink()


def write_text(path: PathLike, text: str) -> None:
    """Writes a file in UTF-8 whole or not at all."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def check_writable(path: PathLike, *, makes_folders: bool = False) -> None:
    """Refuses a place where no file can be written, before the work for it; writes nothing.

    `makes_folders`: the folders above it may be missing.
    """
    with writing(path):
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise IsADirectoryError("a folder has this name")
        if target.exists() and not target.is_file():
            return  # a pipe or a device
        check_folder(target.parent, makes_folders=makes_folders)
        if len(os.fsencode(target.name)) > os.pathconf(_nearest(target), "PC_NAME_MAX"):
            raise OSError("the name is too long")


def check_folder(folder: Path, *, makes_folders: bool) -> None:
    """Raises an OSError where no file can be written in a folder; see `check_writable`."""
    nearest = _nearest(folder)
    if not nearest.is_dir():
        raise NotADirectoryError(f"{nearest} is not a folder")
    if nearest != folder and not makes_folders:
        raise FileNotFoundError(f"{folder} is missing")
    longest = max(len(os.fsencode(part)) for part in folder.parts)
    if longest > os.pathconf(nearest, "PC_NAME_MAX"):
        raise OSError("a folder's name is too long")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(f"{nearest} is not yours to write, or read-only")


def _nearest(path: Path) -> Path:
    """The first that exists of the path and those above it."""
    while not path.exists():
        path = path.parent
    return path
