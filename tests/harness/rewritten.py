"""pytest's rewriting of asserts, shared by the workers of a run.

pytest keeps what it has made of a test file, but its workers begin together, and where nothing is
kept yet (CI) each of them would make all: five seconds of the processor a worker.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def rewrite_my_share(config: pytest.Config) -> None:
    """Of a worker among several: keeps its part of the test files as pytest wants them.

    A file that another worker has not got to is made by whoever imports it, as without this.
    """
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not number.isdigit() or sys.dont_write_bytecode:
        return
    files = sorted((config.rootpath / "tests").rglob("test_*.py"))
    for file in files[int(number) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
        _keep(file, config)


def _keep(file: Path, config: pytest.Config) -> None:
    state = config.stash[rewrite.assertstate_key]
    kept = rewrite.get_cache_dir(file) / (file.name.removesuffix(".py") + rewrite.PYC_TAIL)
    if rewrite._read_pyc(file, kept, state.trace) is not None:
        return
    if rewrite.try_makedirs(kept.parent):
        digest, code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(state, code, digest, kept)
