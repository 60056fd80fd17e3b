"""A job that is told to end, or whose launcher is killed, ends with all its ranks, wherever they
stand."""

import contextlib
import multiprocessing
import os
import signal
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

from megatron_prefix.lab import runtime
from megatron_prefix.lab.cli import main
from megatron_prefix.lab.runtime import Layout, RankError, groups
from tests.harness.bare_ranks import sleep_and_tell
from tests.harness.data import REPOSITORY as ROOT
from tests.harness.fork_server import started
from tests.harness.ranks import run_ranks
from tests.lab.runtime.test_starting_ranks import alive, raise_error

launching = sys.modules[runtime.run_ranks.__module__]  # `runtime.launch` is the function
GRACE_S = launching.GRACE_S
SOON_S = 10.0
"""Of a loaded machine; most end within a tenth of a second."""
JOB = """
    import ctypes, os, signal, sys, time
    from pathlib import Path
    import torch
    from megatron_prefix.lab import runtime

    def stand(where, folder):
        "A rank that never returns to Python, or only with its lock."
        rank = os.environ["RANK"]
        group = None
        if where == "collective":
            runtime.initialize(runtime.Layout(dp=2))
        Path(folder, f".{rank}").write_text(str(os.getpid()), encoding="utf-8")
        os.rename(Path(folder, f".{rank}"), Path(folder, rank))
        if where == "collective" and rank == "0":
            torch.distributed.all_reduce(torch.zeros(1))
        if where == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(300)
        library = ctypes.PyDLL if where == "lock" else ctypes.CDLL
        library(None).sleep(300)

    if __name__ == "__main__":
        runtime.launch(stand, 2, *sys.argv[1:])
"""


@contextlib.contextmanager
def standing_job(folder, where):
    """A launcher whose two ranks stand somewhere, and these."""
    places, path = folder / "places", folder / "job.py"
    places.mkdir()
    path.write_text(textwrap.dedent(JOB), encoding="utf-8")
    # This process's, without being a rank.
    ours = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    variables = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    variables = ours | variables | {"TMPDIR": str(folder)}
    files = [folder / "out", folder / "err"]
    job = started(path, where, str(places), cwd=ROOT, env=variables, files=files)
    try:
        yield job, ranks_of(places, lambda: job.exitcode is None)
    finally:
        job.kill()
        job.join()


def ranks_of(places, is_running):
    """The processes of both ranks, as soon as they stand."""
    deadline = time.monotonic() + 60
    while not all((places / rank).exists() for rank in "01"):
        assert is_running() and time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.2)  # until they are where they stay
    return [int((places / rank).read_text(encoding="utf-8")) for rank in "01"]


def assert_gone(ranks, begin):
    while any(map(alive, ranks)):
        assert time.monotonic() - begin < SOON_S
        time.sleep(0.02)


@pytest.mark.parametrize(("where", "number"), [
    ("collective", signal.SIGTERM), ("lock", signal.SIGTERM), ("call", signal.SIGKILL),
])  # fmt: skip
def test_no_rank_stays_in_what_never_ends(tmp_path, where, number):
    with standing_job(tmp_path, where) as (job, ranks):
        begin = time.monotonic()
        os.kill(job.pid, number)
        assert_gone(ranks, begin)
        job.join(SOON_S)
        assert job.exitcode == (143 if number == signal.SIGTERM else -number)


def test_a_rank_that_hears_no_signal_ends(tmp_path):
    """The second signal must not end the launcher before it has ended its ranks."""
    with standing_job(tmp_path, "deaf") as (job, ranks):
        begin = time.monotonic()
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(job.pid, number)
            time.sleep(0.3)
        assert_gone(ranks, begin + GRACE_S)
        job.join(SOON_S)
        assert job.exitcode == 143


def test_a_signal_while_ranks_start_ends_those_that_have(tmp_path, monkeypatch):
    stock, number = launching._start, signal.SIGTERM

    def start(*args):
        rank = stock(*args)
        os.kill(os.getpid(), number)  # before anybody knows of it
        return rank

    monkeypatch.setattr(launching, "_start", start)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit):
        runtime.run_ranks(sleep_and_tell, 2, (str(tmp_path),))
    assert not [one for one in multiprocessing.active_children() if one.name.startswith("rank")]
    assert signal.getsignal(number) == before


LEAVING_S = 0.5


def leave():
    """A rank that leaves while a message of its is not answered: seconds, and whether it stays."""
    groups.LEAVING_S = LEAVING_S
    begin, pending = time.monotonic(), dist.all_reduce(torch.zeros(1), async_op=True)
    runtime.shutdown()
    runtime.shutdown()  # waits no more
    assert pending is not None
    return time.monotonic() - begin, groups.ends_with_groups()


def run_a_verb_and_leave(verb):
    """A rank's part, as under torchrun: a verb that ends while the other rank stands."""
    runtime.initialize(Layout(dp=2))
    if dist.get_rank():
        time.sleep(30)

    def run(_):
        leave()
        return verb()

    main._run = run
    return main.main([])


def test_a_rank_leaves_groups_that_nobody_answers():
    def job():
        runtime.initialize(Layout(dp=2))
        if dist.get_rank():
            time.sleep(3)
            return 0.0, False
        return leave()

    begin = time.monotonic()
    (seconds, is_left), _ = run_ranks(2, job)
    assert is_left and seconds < 2.5, "as long as the other rank takes"
    assert time.monotonic() - begin < 3 + 2 * SOON_S


@pytest.mark.parametrize(("verb", "code"), [(lambda: 2, 2), (raise_error, 1)])
def test_the_exit_code_stays_true(verb, code):
    """Where the process cannot end in order, too."""
    with pytest.raises(RankError, match=f"rank 0 died with exit code {code}"):
        run_ranks(2, run_a_verb_and_leave, verb)
