"""The folder of a run: its lock, and its newest checkpoint."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatron_prefix.errors import UserError
from megatron_prefix.plan.files import writing

logger = logging.getLogger(__name__)

FOLDER, LATEST, STATE, LOCK = "checkpoints", "latest", "train.json", "run.lock"
METRICS = "metrics.jsonl"
_NAME = re.compile(r"step-\d{6,9}", re.ASCII)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

# One writer ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a folder, which is made if it is missing.

    The operating system lets go of the lock when its holder dies, however that happens. Folders
    that nothing was written into are gone afterwards.

    Raises:
        UserError: another run writes into it, the folder cannot be written, or its lock is no
            file of its own.
    """
    new = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        with writing(folder):
            file = _lock(folder)
        try:
            with writing(folder):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            yield
        finally:
            with contextlib.suppress(OSError):
                (folder / LOCK).unlink()  # while it is ours: see _lock
            file.close()
    finally:
        for path in new:
            with contextlib.suppress(OSError):
                path.rmdir()


def _lock(folder: Path) -> BinaryIO:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = _opened(folder / LOCK)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise _taken(folder, file) from None
            logger.warning("%s: no locks here; let no other run write there", folder)
        # A holder that has just ended took the file's name with it: then lock the new one.
        if _same(file, folder / LOCK):
            return file
        file.close()


def _opened(path: Path) -> BinaryIO:
    """The lock, a file of its own: it is emptied, and what a link names would be.

    Raises:
        UserError: something else has its name.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
    else:
        found = os.fstat(file.fileno())
        if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
            return file
        file.close()
    raise UserError(f"{path}: is not a plain file, and a run would overwrite it; remove it")


def _taken(folder: Path, file: BinaryIO) -> UserError:
    file.seek(0)
    holder = file.read(200).decode("utf-8", "replace").strip() or "another process"
    file.close()
    return UserError(
        f"--output {folder}: another run writes there ({' '.join(holder.split())}); name another"
        " folder, or end that run"
    )


def _same(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


# Its checkpoints ----------------------------------------------------------------------------------


def has_checkpoints(output: Path) -> bool:
    """Whether a run's folder holds a complete checkpoint, or a word of one.

    Raises:
        UserError: the folder cannot be read.
    """
    try:
        return (output / FOLDER / LATEST).exists() or newest(output / FOLDER) is not None
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"--output {output}: cannot be read ({why})") from None


def check_unused(output: Path, *, overwrite: bool) -> None:
    """Refuses the folder of another run.

    Args:
        overwrite: whether its metrics may be replaced. Its checkpoints never are.

    Raises:
        UserError: saying how to go on with it.
    """
    metrics = output / METRICS
    if has_checkpoints(output):
        raise UserError(
            f"--output {output}: holds the checkpoints of a run; add --resume to "
            "continue it, or name another folder"
        )
    if metrics.is_file() and metrics.stat().st_size and not overwrite:
        raise UserError(
            f"--output {output}: holds the metrics of a run and no checkpoint; add --overwrite to"
            " replace them, or name another folder"
        )


def find(path: Path) -> Path | None:
    """The newest complete checkpoint of a run's folder; None when it has none.

    Args:
        path: a run's folder, its `checkpoints` folder, or one checkpoint.

    Raises:
        UserError: `path` does not exist, is an incomplete checkpoint, or `latest` names none.
    """
    try:
        return _find(path)
    except OSError as error:
        raise UserError(f"--resume {path}: cannot be read ({error.strerror or error})") from None


def _find(path: Path) -> Path | None:
    if (path / STATE).is_file():
        return path
    for folder in (path / FOLDER, path):
        if (folder / LATEST).is_file():
            return _latest(folder / LATEST)
        last = newest(folder)
        if last is not None:
            raise UserError(f"{folder / LATEST}: missing; name a checkpoint: --resume {last}")
    if not path.exists():
        raise UserError(f"--resume {path}: no such folder")
    if path.parent.name == FOLDER:
        raise UserError(f"--resume {path}: not a complete checkpoint ({STATE} is missing)")
    return None


def _latest(path: Path) -> Path:
    """The checkpoint that `latest` names."""
    name = path.read_bytes()[:100].decode("ascii", "replace").strip()
    other = newest(path.parent)
    fix = f"name one: --resume {other}" if other else "resume from another folder"
    if not _NAME.fullmatch(name):
        raise UserError(f"{path}: names no checkpoint ({name!r}); {fix}")
    if not (path.parent / name / STATE).is_file():
        what = f"incomplete: {STATE} is missing" if (path.parent / name).is_dir() else "not there"
        raise UserError(f"{path}: names {name}, which is {what}; {fix}")
    return path.parent / name


def newest(folder: Path) -> Path | None:
    """The complete checkpoint of the most steps in a folder of checkpoints."""
    names = [path.parent.name for path in folder.glob(f"step-*/{STATE}")]
    checkpoints = [name for name in names if _NAME.fullmatch(name)]
    return folder / max(checkpoints, key=lambda name: int(name[5:])) if checkpoints else None
