"""Small files that are read whole.  [pure]"""

from __future__ import annotations

import errno
import io
import os

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
