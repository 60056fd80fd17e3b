"""Settings of every test: one thread, one core if others are busy, repeatable examples, poisoned
memory."""

import gc
import os
import sys
from collections.abc import Generator, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when it is imported

import hypothesis
import pytest
import torch

from tests.harness.forked_workers import fork_workers
from tests.harness.frames import keep_to_one_core, with_room

# The same examples in every run; HYPOTHESIS_PROFILE=search looks for new ones.
hypothesis.settings.register_profile(
    "repeatable",
    max_examples=30,
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("search", deadline=None, max_examples=500, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

LONGEST = (
    "test_cases", "test_cases_on_ranks", "test_oracle", "test_verl", "test_cases_of_trainers",
    "test_mtp_newer", "test_packaging", "test_train", "test_cases_across_ranks", "test_vision",
    "test_quantised", "test_two_nodes", "test_overlap", "test_byte_meter", "test_graphs",
    "test_pretrain", "test_memory_limit_ranks", "test_cases_with_graphs",
    "test_out_of_memory", "test_fp8", "test_deal", "test_tree", "test_across_step", "test_failures",
    "test_graphs_auto", "test_resume", "test_placed", "test_segments", "test_shipped",
    "test_features", "test_site", "test_mtp", "test_rooms", "test_bench_steps", "test_sparse",
    "test_graphs_memory", "test_dead_rank", "test_benchmarks",
)  # fmt: skip
"""Files of tests that take most time, longest first (pytest --durations=0)."""


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN until they are written, so a buffer that is read too early shows.

    torch fills them when deterministic algorithms are on; ranks that a test forks inherit it.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def on_one_rank() -> Iterator[None]:
    from tests.harness.one_rank import one_rank

    with one_rank():
        yield


@pytest.fixture(scope="module")
def on_one_rank_frozen(on_one_rank: None) -> Iterator[None]:
    """What is there already does not concern the collector in these tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


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


def pytest_configure(config: pytest.Config) -> None:
    """Several workers are forked, as what they import is the same; GPUs are then out of sight."""
    keep_to_one_core()
    # Steps leave tens of thousands of objects and hardly any garbage, here and in forked ranks.
    gc.set_threshold(10_000, 20, 20)
    whole = config.args_source is not pytest.Config.ArgsSource.ARGS
    num = len(config.getoption("tx", None) or ())
    if num < 2 or sys.platform != "linux" or "PYTEST_XDIST_WORKER" in os.environ:
        return
    if whole:
        fork_workers(config, num, sorted((config.rootpath / "tests").rglob("test_*.py")))
    elif not torch.cuda.is_available():
        fork_workers(config, num, [])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begins with the longest files, then those with slow tests, and skips GPU tests where there is
    no GPU.

    Workers take file after file: a long one that begins last would leave the others idle.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (place.get(item.path.stem, len(place)), item.path not in slow))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="torch sees no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
