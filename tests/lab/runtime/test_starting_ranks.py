"""Starting and ending the ranks of a job; one that is told to end, or whose launcher is killed,
ends with all its ranks, wherever they stand."""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_prefix.errors import UserError
from megatron_prefix.lab import runtime
from megatron_prefix.lab.cli import main
from megatron_prefix.lab.runtime import Layout, RankError, folders, groups
from tests.harness.bare_ranks import rank_and_threads, sleep_and_tell
from tests.harness.data import REPOSITORY as ROOT
from tests.harness.fork_server import started
from tests.harness.ranks import run_ranks


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


@pytest.mark.parametrize(("rank", "fail", "error", "message"), [
    (0, raise_error, RankError, r"rank {}(?s:.*)in raise_error(?s:.*)the sum is not the total"),
    (2, raise_user_error, UserError, r"^row 3 is empty; delete it$"),
    (0, be_killed, RankError, "rank {} died with exit code -9"),
    (2, die, RankError, "rank {} died with exit code 7(?s:.*)last words"),
], ids=["exception", "user error", "killed", "died"])  # fmt: skip
def test_one_failure_ends_the_set_and_is_told(rank, fail, error, message):
    start = time.monotonic()
    with pytest.raises(error, match=message.format(rank)):
        run_ranks(3, fail_on, rank, fail)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(("fail", "begin", "both"), [
    (die, "rank 1 died with exit code 7", True),
    (raise_user_error, "row 3 is empty; delete it", False),
], ids=["died", "user error"])  # fmt: skip
def test_a_lost_connection_is_not_taken_for_the_cause(fail, begin, both):
    """Rank 0 is heard first, though the other has failed before it."""

    def job():
        if os.environ["RANK"] == "0":
            raise RuntimeError("[gloo] Connection closed by peer")
        time.sleep(0.3)
        fail()

    with pytest.raises((RankError, UserError)) as caught:
        run_ranks(2, job)
    assert str(caught.value).startswith(begin)
    assert ("Connection closed by peer" in str(caught.value)) == both


def alive(pid):
    """Whether the process runs; one that has ended but is not yet collected does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    return text.rsplit(")", 1)[1].split()[0] != "Z"


def test_a_set_that_takes_too_long_ends_and_says_where(tmp_path):
    with pytest.raises(RankError) as caught:
        run_ranks(2, sleep_and_tell, tmp_path, timeout_s=1.5)
    first, *lines, last = str(caught.value).splitlines()
    assert first == "rank 0 is here:" and "rank 1 is here:" in lines
    assert sum("in sleep_and_tell" in line for line in lines) == 2
    assert last == "ranks [0, 1] did not finish in 1.5 s"
    assert not any(alive(int(path.read_text(encoding="utf-8"))) for path in tmp_path.iterdir())


def test_only_folders_of_dead_jobs_are_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in (
        "megatron_prefix_/owner",
        "other_/owner",
        "megatron_prefix_x/x",
        "elsewhere/owner",
    ):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    (tmp_path / "megatron_prefix_link").symlink_to(tmp_path / "elsewhere")
    with folders.new_folder() as folder:
        folders.sweep()
        left = {path.name for path in tmp_path.iterdir()}
    kept = {"other_", "megatron_prefix_x", "megatron_prefix_link", "elsewhere"}
    assert left == kept | {folder.name}
    assert not folder.exists()


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
