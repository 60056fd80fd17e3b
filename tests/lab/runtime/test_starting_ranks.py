"""Starting and ending the ranks of a job."""

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch

from megatron_prefix.errors import UserError
from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout, RankError, folders
from tests.harness.bare_ranks import rank_and_threads, sleep_and_tell
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
