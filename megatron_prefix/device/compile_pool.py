"""Kernels compiled by processes beside this one, before they first run here.

Compilers keep what they have made on disk, where another process finds it. So several processes
compile what a model will need, each a part, and this one loads it. Nothing depends on it: what is
missing afterwards is compiled where it first runs, as it would have been.

A file in the compiler's own folder says that it was tried; it goes with the folder. Of the
processes of one host that ask at once, one compiles, and the others wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

logger = logging.getLogger(__name__)
MOST_WORKERS = 8
TOLD_EVERY = 10.0
"""Seconds between lines of progress."""
_LOOKED_EVERY = 0.05


class _Worker(NamedTuple):
    process: subprocess.Popen[bytes]
    errors: IO[bytes]


def compile_beside(
    what: str, jobs: Sequence[Sequence[str]], folder: Path, key: str, seconds: float
) -> None:
    """Runs jobs that compile, several at once; never raises what goes wrong with them.

    Args:
        what: they compile, for messages.
        jobs: arguments for Python, a process each.
        folder: of the compiler, in which it is noted that they have run.
        key: what their results are good for; with another one they run again.
        seconds: after which what is left is ended.
    """
    name = "megatron_prefix-" + hashlib.sha256(key.encode()).hexdigest()[:16]
    tried = folder / f"{name}.tried"
    deadline = time.monotonic() + seconds
    try:
        if tried.exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{name}.lock", deadline) as mine:
            if mine and not tried.exists():
                _run(what, deque(jobs), deadline)
                tried.touch()
    except OSError as error:  # no right to the folder, no process left
        logger.info("%s is compiled where it first runs: %s", what, error)


def workers() -> int:
    """Processes that compile at once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(MOST_WORKERS, cores or 1))


def end_with_starter() -> None:
    """A job's process, and what it has started, ends when the one that started it does; it calls
    this first."""

    def wait() -> None:
        # Nothing is sent: it returns when the other end is closed. Not by `sys.stdin`, whose lock
        # this thread would hold when the process ends.
        os.read(0, 1)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def _locked(path: Path, deadline: float) -> Iterator[bool]:
    """Whether this process has the lock; waits for it until the deadline."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(_LOOKED_EVERY)
                    continue
                yield False
                return
            yield True  # closing the file gives the lock back
            return


def _run(what: str, jobs: deque[Sequence[str]], deadline: float) -> None:
    begin, num, most = time.monotonic(), len(jobs), workers()
    running: list[_Worker] = []
    logger.warning("%s: %d parts are compiled in %d processes", what, num, min(num, most))
    next_line = begin + TOLD_EVERY
    try:
        while (jobs or running) and time.monotonic() < deadline:
            while jobs and len(running) < most:
                running.append(_started(jobs.popleft()))
            running = [one for one in running if not _ended(one, what)]
            if time.monotonic() > next_line:
                _tell(what, num - len(jobs) - len(running), num, begin)
                next_line += TOLD_EVERY
            time.sleep(_LOOKED_EVERY)
    finally:
        done = num - len(jobs) - len(running)
        for one in running:
            _end(one)
    _tell(what, done, num, begin)


def _tell(what: str, done: int, num: int, begin: float) -> None:
    seconds = time.monotonic() - begin
    logger.warning("%s: %d of %d parts compiled, %.0f s", what, done, num, seconds)


def _started(job: Sequence[str]) -> _Worker:
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `_end`
    process = subprocess.Popen(
        [sys.executable, *job], env={**os.environ, "PYTHONPATH": paths}, stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
    )  # fmt: skip
    return _Worker(process, errors)


def _ended(one: _Worker, what: str) -> bool:
    """Whether a process has ended; what it left behind ends, too."""
    status = one.process.poll()
    if status is None:
        return False
    if status:
        one.errors.seek(0)
        last = (one.errors.read().decode(errors="replace").strip().splitlines() or [""])[-1]
        logger.info("a part of %s is compiled where it first runs: %s", what, last)
    _end(one)
    return True


def _end(one: _Worker) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(one.process.pid, signal.SIGKILL)  # a session of its own: its compilers, too
    one.process.wait()
    if one.process.stdin is not None:
        one.process.stdin.close()
    one.errors.close()
