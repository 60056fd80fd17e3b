"""pytest's rewriting of asserts, by two processes where nothing is kept yet (CI)."""

import contextlib
import os
import sys

from _pytest.assertion import rewrite


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
