"""Modules and scripts run as commands in processes that have imported torch and Megatron already.

A new Python takes four to six seconds of the processor for these imports, more than most commands
take for their work. The standard library's fork server imports them once, in a process that has no
threads, no process groups and nothing of the tests, and forks the commands.
"""

import contextlib
import functools
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing import forkserver, util
from pathlib import Path
from unittest import mock

from tests.harness.frames import keep_to_one_core, with_room

IMPORTED = [
    "tests.harness.ranks", "megatron_prefix.lab.models.build", "megatron_prefix.lab.cli.main",
    "megatron_prefix.lab.rl.checkpoint", "megatron_prefix.lab.rl.job",
    "megatron_prefix.lab.verify.align", "rich.markup", "rich.table",
]  # fmt: skip
"""What commands begin with, and with it what ranks that they start would import each for itself."""


def forked_module(module, *arguments, cwd, env=None, timeout=300.0):
    """`python -m MODULE ARGUMENTS` on the CPU, or `python SCRIPT ARGUMENTS`, and what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("out", "err")]
        process = started(module, *arguments, cwd=cwd, env=env, files=files)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired([str(module), *arguments], timeout)
        out, err = (path.read_text("utf-8") if path.exists() else "" for path in files)
        return subprocess.CompletedProcess([str(module), *arguments], process.exitcode, out, err)


def started(module, *arguments, cwd, env=None, files):
    """As `forked_module`, without waiting for its end; `files` get its stdout and its stderr."""
    context = _context()
    given = (module, arguments, str(cwd), dict(os.environ if env is None else env), files)
    process = context.Process(target=_run, args=given)
    process.start()
    return process


def share_server():
    """This process and those that it forks have one server, which is forked from it now."""
    for module in IMPORTED:
        importlib.import_module(module)
    _context()
    with mock.patch.object(util, "spawnv_passfds", functools.partial(_fork, util.spawnv_passfds)):
        forkserver.ensure_running()
    forkserver._forkserver.ensure_running = lambda: None  # only its parent can ask whether it runs


def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def _fork(spawn, path, arguments, files):
    """A fork that runs what is to be `python -c CODE` and inherits `files`, where `spawn` does."""
    pid = os.fork()
    if pid:
        return pid
    try:
        util.spawnv_passfds = spawn
        others = {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, *files}
        for number in others:
            with contextlib.suppress(OSError):
                os.close(number)
        exec(arguments[-1], {})
    finally:
        os._exit(1)


def _run(module, arguments, cwd, env, files):
    for number, path in enumerate(files, 1):
        with open(path, "wb") as file:
            _stream(number, file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    keep_to_one_core()
    tempfile.tempdir = None  # is what the environment says
    sys.argv = [str(module), *arguments]
    if isinstance(module, Path):
        sys.path.insert(0, str(module.parent))
        with_room(runpy.run_path, str(module), run_name="__main__")
    else:
        with_room(runpy.run_module, module, run_name="__main__", alter_sys=True)


def _stream(number, file):
    """Makes the file the process's stdout (1) or stderr (2), for Python and for what is in C."""
    name = ("stdout", "stderr")[number - 1]
    os.dup2(file.fileno(), number)
    setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
