"""The folder of a job in the temporary directory, and those of jobs that were killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_prefix.plan.files import PathLike, check_folder, writing

PREFIX = "megatron_prefix_"
OWNER = "owner"
"""File that the job holds a lock on. The kernel gives the lock back when the last process of the
job has ended, whatever ended it."""


@contextlib.contextmanager
def new_folder() -> Iterator[Path]:
    """A new folder, removed at the end; what killed jobs left behind is removed first."""
    sweep()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        folder = Path(name)
        # Locked under another name: `sweep` must not find it before it is.
        with open(folder / f"{OWNER}.new", "w", encoding="utf-8") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX)
            os.rename(owner.name, folder / OWNER)
            yield folder


def sweep() -> None:
    """Removes folders of this user's jobs of which no process lives."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # gone already, or somebody else's
            if folder.is_symlink() or folder.lstat().st_uid != os.getuid():
                continue
            with open(folder / OWNER, "r+", encoding="utf-8") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def check_folder_writable(path: PathLike) -> None:
    """Refuses a folder in which no file can be written; it may be missing, with those above it.

    Raises:
        UserError: a file is in the way, permissions lack, or a name is too long.
    """
    with writing(path):
        check_folder(Path(os.path.realpath(path)), makes_folders=True)
