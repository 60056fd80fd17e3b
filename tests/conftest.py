"""Settings of every test: one thread, one core if others are busy, repeatable examples, poisoned
memory."""

from __future__ import annotations

import collections
import gc
import os
import sys
from collections.abc import Generator, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when it is imported

import hypothesis
import pytest
import torch

from tests.harness.cores import keep_to_one_core
from tests.harness.forked_workers import fork_workers
from tests.harness.frames import with_room
from tests.harness.rows import EVERYTHING, TURN, TURNS, check_turn, takes_its_turn, turn_of

# The same examples in every run; HYPOTHESIS_PROFILE=search looks for new ones.
hypothesis.settings.register_profile(
    "repeatable",
    max_examples=50,
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("search", deadline=None, max_examples=500, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN until they are written, so a buffer that is read too early shows.

    torch fills them when deterministic algorithms are on; ranks that a test forks inherit it.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Garbage is not looked for while tests are imported: it takes as long as the imports."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> object:
    """Tests, their fixtures and the ranks that they fork have room for their frames."""
    runner = item.config.pluginmanager.get_plugin("runner")
    return with_room(runner.pytest_runtest_protocol, item, nextitem)


def pytest_addoption(parser: pytest.Parser) -> None:
    """With `--all` a run of the whole suite leaves nothing out."""
    parser.addoption("--all", action="store_true", help="run all rows (tests/harness/rows.py)")


def pytest_configure(config: pytest.Config) -> None:
    """A run of the whole suite leaves something out; who names a file or a test gets all of it.

    Several workers are forked, as what they import is the same; GPUs are then out of sight.
    """
    keep_to_one_core()
    whole = config.args_source is not pytest.Config.ArgsSource.ARGS
    if config.getoption("--all") or not whole:
        os.environ[EVERYTHING] = "1"
    os.environ.setdefault(TURN, str(turn_of(config.rootpath)))
    check_turn()
    num = len(config.getoption("tx", None) or ())
    if num < 2 or sys.platform != "linux" or "PYTEST_XDIST_WORKER" in os.environ:
        return
    if whole:
        fork_workers(config, num, sorted((config.rootpath / "tests").rglob("test_*.py")))
    elif not torch.cuda.is_available():
        fork_workers(config, num, [])


def pytest_report_header() -> str:
    """Which rows are run."""
    if EVERYTHING in os.environ:
        return "rows: all"
    return f"rows: products left out, turn {os.environ[TURN]} of 0 to {TURNS - 1}"


def leave_rows_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Unless everything is to be run; see tests/harness/rows.py."""
    if EVERYTHING in os.environ:
        return
    numbers = collections.Counter[str]()
    kept, left = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        runs = not item.get_closest_marker("products")
        if runs and item.get_closest_marker("turns"):
            test = item.nodeid.partition("[")[0]
            runs = takes_its_turn(numbers[test])
            numbers[test] += 1
        (kept if runs else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begins with files that have slow tests, and skips GPU tests where there is no GPU.

    Workers take file after file: a long one that begins last would leave the others idle.
    """
    leave_rows_out(config, items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="torch sees no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
