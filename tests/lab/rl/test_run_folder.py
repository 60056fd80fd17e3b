"""A run's folder: one writer at a time."""

import multiprocessing
import os
import socket

import pytest

from megatron_prefix.errors import UserError
from megatron_prefix.lab.rl.run_folder import LOCK, claimed
from tests.harness.ranks import forked
from tests.harness.training import settings, train


def hold(folder, pipe):
    """A run that writes until it is told to leave."""
    with claimed(folder):
        pipe.send("ready")
        pipe.recv()


@pytest.fixture
def holder(tmp_path):
    here, there = multiprocessing.Pipe()
    process = forked(hold, tmp_path / "run", there)
    assert here.poll(30)
    yield process, here
    process.kill()
    process.join()


def test_another_run_is_refused_with_the_holder(tmp_path, holder):
    process, pipe = holder
    with (
        pytest.raises(UserError, match=f"process {process.pid} on {socket.gethostname()}"),
        claimed(tmp_path / "run"),
    ):
        pass
    assert os.listdir(tmp_path / "run") == [LOCK]
    pipe.send("leave")
    process.join()
    assert not (tmp_path / "run").exists()
    with claimed(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK).read_text("utf-8") == f"process {os.getpid()} on " + (
            socket.gethostname()
        )


def test_a_lock_dies_with_its_holder(tmp_path, holder):
    process, _ = holder
    process.kill()
    process.join()
    assert os.listdir(tmp_path / "run") == [LOCK]
    with claimed(tmp_path / "run"):
        (tmp_path / "run" / "file").touch()
    assert os.listdir(tmp_path / "run") == ["file"]


def test_metrics_of_another_run_are_kept(tmp_path):
    """With --resume, too, where there is no checkpoint; --overwrite says what is wanted."""
    metrics, part = tmp_path / "run" / "metrics.jsonl", settings(groups_per_step=1)
    train(tmp_path / "run", 1, part)
    before, there = metrics.read_bytes(), sorted(tmp_path.rglob("*"))
    for resume in (None, "auto"):
        with pytest.raises(UserError, match="metrics of a run and no checkpoint; add --overwrite"):
            train(tmp_path / "run", 2, part, resume=resume)
    assert metrics.read_bytes() == before and sorted(tmp_path.rglob("*")) == there
    train(tmp_path / "run", 2, part, overwrite=True)
    assert len(metrics.read_bytes().splitlines()) == 2
    train(tmp_path / "run", 1, part, resume="auto", overwrite=True)
    assert len(metrics.read_bytes().splitlines()) == 1


def test_a_lock_is_never_another_file(tmp_path):
    """It is emptied, so a link of its name would cost what it names."""
    thesis, lock = tmp_path / "thesis", tmp_path / "run" / LOCK
    thesis.write_text("mine", encoding="utf-8")
    lock.parent.mkdir()
    for make in (
        lambda: lock.symlink_to(thesis),
        lambda: lock.symlink_to(tmp_path / "missing"),
        lambda: lock.hardlink_to(thesis),
        lambda: os.mkfifo(lock),
    ):
        make()
        with pytest.raises(UserError, match=f"{lock}: is not a plain file"), claimed(lock.parent):
            pass
        assert os.path.lexists(lock)
        lock.unlink()
    assert sorted(os.listdir(tmp_path)) == ["run", "thesis"]
    assert thesis.read_text("utf-8") == "mine"
