"""xdist's workers, forked from the process that starts them: no new interpreters.

Each would take ten seconds of the processor to import torch, Megatron and all tests for itself, and
six for its fork server (tests/harness/fork_server.py).
"""

import atexit
import contextlib
import gc
import os
import signal
import sys
import types
import warnings

import pytest
import torch
from _pytest.assertion import rewrite
from _pytest.pathlib import import_path
from execnet import gateway_base, gateway_io

from tests.harness.fork_server import share_server


def fork_workers(config, count, files):
    """Forks the next `count` workers that xdist starts here; they have imported these tests.

    One that it starts later, since another has ended in a test, is a new interpreter as ever.
    """
    share_server()
    with rewrite_beside(files, config):
        import_tests(files, config)
    gc.freeze()  # what is imported stays
    forked = []
    for _ in range(count):
        forked.append(_fork(forked))
    otherwise = gateway_io.create_io

    def create_io(spec, execmodel):
        if not forked:
            return otherwise(spec, execmodel)
        return forked.pop(0).connected(execmodel)

    gateway_io.create_io = create_io


def import_tests(files, config):
    """As collecting them does. What cannot be imported is left to the workers, which say so."""
    options = {
        "mode": config.getoption("importmode"),
        "root": config.rootpath,
        "consider_namespace_packages": config.getini("consider_namespace_packages"),
    }
    gc.disable()  # it takes as long as the imports
    for file in files:
        before = {*sys.modules}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import_path(file, **options)
        except (Exception, pytest.skip.Exception):  # noqa: BLE001
            for name in {*sys.modules} - before:
                if name.startswith("tests.") or name.endswith(file.stem):
                    del sys.modules[name]
    gc.enable()


class _Forked(gateway_base.Popen2IO):
    """A worker and pipes to it and back, as execnet has them of an interpreter that it starts."""

    def __init__(self, pid, to, back):
        self.pid, self.ends = pid, (to, back)

    def connected(self, execmodel):
        to, back = self.ends
        super().__init__(os.fdopen(to, "wb"), os.fdopen(back, "rb"), execmodel)
        return self

    def wait(self):
        with contextlib.suppress(ChildProcessError):
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return None

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _fork(before):
    (there, to), (back, from_there) = os.pipe(), os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(there)
        os.close(from_there)
        return _Forked(pid, to, back)
    try:
        # A worker ends when nobody can write to it any more.
        for end in (to, back, *(end for other in before for end in other.ends)):
            os.close(end)
        for number, end in enumerate((there, from_there)):
            os.dup2(end, number)
            os.close(end)
        _serve()
    finally:
        os._exit(1)


def _serve():
    """What execnet lets a new interpreter do, and an interpreter at its end."""
    atexit._clear()  # that is for the process that it was forked from
    # After a fork torch makes its pool anew when asked: of two threads at once one finds none.
    torch.set_num_threads(torch.get_num_threads())
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    exec(gateway_io.popen_bootstrapline, {})
    atexit._run_exitfuncs()
    os._exit(0)


@contextlib.contextmanager
def rewrite_beside(files, config):
    """Another process keeps test files as pytest wants them, from the last to the first.

    A file that it has not got to is made by whoever imports it, as without this.
    """
    pid = 0 if sys.dont_write_bytecode else os.fork()
    if pid == 0 and not sys.dont_write_bytecode:
        try:
            for file in reversed(files):
                _keep(file, config)
        finally:
            os._exit(0)
    yield
    if pid:
        os.waitpid(pid, 0)


def _keep(file, config):
    state = config.stash[rewrite.assertstate_key]
    kept = rewrite.get_cache_dir(file) / (file.name.removesuffix(".py") + rewrite.PYC_TAIL)
    if rewrite._read_pyc(file, kept, state.trace) is not None:
        return
    if rewrite.try_makedirs(kept.parent):
        digest, code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(state, code, digest, kept)
