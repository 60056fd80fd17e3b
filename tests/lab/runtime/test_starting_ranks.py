"""Starting and ending the ranks of a job."""

import contextlib
import os
import signal
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
import torch

from megatron_prefix.errors import UserError
from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout, RankError, folders
from tests.harness.bare_ranks import rank_and_threads, sleep_and_tell
from tests.harness.fork_server import forked_module, started
from tests.harness.ranks import run_ranks

ROOT = Path(__file__).parents[3]


def test_every_rank_has_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert runtime.launch(rank_and_threads, 3, 0)[1] == 2
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert runtime.launch(rank_and_threads, 3, 0)[1] == 1


def test_tensors_come_back_by_value():
    results = run_ranks(2, lambda: torch.full((3,), float(os.environ["RANK"])))
    assert [result.tolist() for result in results] == [[0.0] * 3, [1.0] * 3]


def test_ranks_may_be_spawned_as_cuda_needs():
    results = runtime.run_ranks(rank_and_threads, 2, (5,), start_method="spawn", threads=1)
    assert results == [(5, 1), (6, 1)]


def fail_on(rank, fail):
    """`fail` on one rank while the others wait for it in a collective."""
    runtime.initialize(Layout(dp=3))
    if torch.distributed.get_rank() == rank:
        fail()
    torch.distributed.barrier()


def raise_error():
    raise ArithmeticError("the sum is not the total")


def raise_user_error():
    raise UserError("row 3 is empty; delete it")


def die():
    os.write(2, b"last words\n")
    os._exit(7)


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("rank", "fail", "error", "message"),
    [
        (0, raise_error, RankError, r"rank {}(?s:.*)in raise_error(?s:.*)the sum is not the total"),
        (2, raise_user_error, UserError, r"^row 3 is empty; delete it$"),
        (0, be_killed, RankError, "rank {} died with exit code -9"),
        (2, die, RankError, "rank {} died with exit code 7"),
    ],
    ids=["exception", "user error", "killed", "died"],
)
def test_one_failure_ends_the_set_and_is_told(rank, fail, error, message):
    start = time.monotonic()
    with pytest.raises(error, match=message.format(rank)):
        run_ranks(3, fail_on, rank, fail)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("cause", ["died", "user error"])
def test_a_lost_connection_is_not_taken_for_the_cause(cause):
    """Rank 0 is heard first, though the other has failed before it."""
    fail = {"died": die, "user error": raise_user_error}[cause]

    def job():
        if os.environ["RANK"] == "0":
            raise RuntimeError("[gloo] Connection closed by peer")
        time.sleep(0.3)
        fail()

    with pytest.raises((RankError, UserError)) as caught:
        run_ranks(2, job)
    begins = {"died": "rank 1 died with exit code 7"}
    assert str(caught.value).startswith(begins.get(cause, "row 3 is empty; delete it"))
    assert ("Connection closed by peer" in str(caught.value)) == (cause != "user error")


def alive(pid):
    """Whether the process runs; one that has ended but is not yet collected does not."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
            != "Z"
        )
    except FileNotFoundError:
        return False


def test_a_set_that_takes_too_long_ends_and_says_where(tmp_path):
    with pytest.raises(RankError) as caught:
        run_ranks(2, sleep_and_tell, tmp_path, timeout_s=1.5)
    first, *lines, last = str(caught.value).splitlines()
    assert first == "rank 0 is here:" and "rank 1 is here:" in lines
    assert sum("in sleep_and_tell" in line for line in lines) == 2
    assert last == "ranks [0, 1] did not finish in 1.5 s"
    assert not any(alive(int(path.read_text(encoding="utf-8"))) for path in tmp_path.iterdir())


def script(folder, code):
    """A Python file; it may import this package."""
    path = folder / "job.py"
    path.write_text(textwrap.dedent(code), encoding="utf-8")
    return path


def environment():
    """This process's, without being a rank."""
    ours = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**ours, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}


JOB = """
    import sys, torch
    from megatron_prefix.lab import runtime

    def job(layout):
        world = runtime.initialize(layout)
        total = torch.ones(())
        torch.distributed.all_reduce(total)
        print(f"rank {world.rank} sees {int(total)}", flush=True)

    if __name__ == "__main__":
        runtime.launch(job, 2, runtime.Layout(dp=2))
        runtime.shutdown()
"""


def test_only_rank_zero_is_heard_when_ranks_are_started_here(tmp_path):
    done = forked_module(script(tmp_path, JOB), cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0 sees 2\n"


WAITING_JOB = """
    import signal
    import sys
    from megatron_prefix.lab import runtime
    from tests.harness.bare_ranks import sleep_and_tell

    if __name__ == "__main__":
        # A shell's background jobs are started with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        runtime.run_ranks(sleep_and_tell, 2, sys.argv[1:2], start_method=sys.argv[2])
"""


@contextlib.contextmanager
def waiting_job(folder, start="fork"):
    """A launcher in a process of its own, and the processes of its two ranks, which sleep."""
    pids = folder / "pids"
    pids.mkdir()
    variables = {**environment(), "TMPDIR": str(folder)}
    job = started(
        script(folder, WAITING_JOB), str(pids), start, cwd=ROOT, env=variables,
        files=[os.devnull] * 2,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while len(list(pids.iterdir())) < 2 or not all(
            p.read_text(encoding="utf-8") for p in pids.iterdir()
        ):
            assert job.exitcode is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield job, [int(path.read_text(encoding="utf-8")) for path in pids.iterdir()]
    finally:
        job.kill()
        job.join()


@pytest.mark.parametrize(
    ("number", "start"),
    [
        (signal.SIGINT, "fork"), (signal.SIGKILL, "spawn"),
    ],
)  # fmt: skip
def test_no_rank_outlives_its_launcher(tmp_path, monkeypatch, number, start):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with waiting_job(tmp_path, start) as (job, ranks):
        if number == signal.SIGKILL:
            os.kill(ranks[0], signal.SIGSTOP)  # a stopped rank ends too
        folders.sweep()
        assert len(list(tmp_path.glob(f"{folders.PREFIX}*"))) == 1  # its owner lives
        os.kill(job.pid, number)
        job.join(30)
        assert job.exitcode
    deadline = time.monotonic() + 5
    while any(map(alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, ranks))
    assert len(list(tmp_path.glob(f"{folders.PREFIX}*"))) == (number == signal.SIGKILL)
    assert run_ranks(1, os.getpid) != [os.getpid()]
    assert not list(tmp_path.glob(f"{folders.PREFIX}*"))  # swept at the next start


def stand(seconds):
    """A step that stands on every rank."""
    from megatron_prefix.features.watchdog.watchdog import Watchdog

    runtime.initialize(Layout(dp=2))
    with Watchdog(seconds / 3).step(lambda: 0.0):
        time.sleep(seconds)
