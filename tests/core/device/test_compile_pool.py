"""Kernels are compiled by processes beside, whatever happens to these; with stand-in jobs."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_prefix.device import compile_pool
from megatron_prefix.device.compile_pool import compile_beside


def touch(path: Path, after: float = 0.0, before: str = "pass") -> list[str]:
    """A job that makes a file, whose name says in which process."""
    program = f"import os, sys, time; {before}; time.sleep({after});"
    return ["-c", program + f"open({str(path)!r} + str(os.getpid()), 'w')"]


def asking(job: list[str], folder: Path, seconds: float) -> str:
    """The program of a process that wants a job done."""
    return (
        "from pathlib import Path; from megatron_prefix.device.compile_pool import compile_beside;"
        f" compile_beside('kernels', [{job!r}], Path({str(folder)!r}), 'key', {seconds})"
    )


def files(folder: Path, start: str) -> list[Path]:
    return sorted(folder.glob(start + "*"))


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_jobs_run_side_by_side_and_once(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(compile_pool, "workers", lambda: 2)
    monkeypatch.setattr(compile_pool, "TOLD_EVERY", 0.2)
    cache = tmp_path / "not there yet"
    jobs = [touch(tmp_path / f"job{number} ", 0.5) for number in range(4)]
    with caplog.at_level(logging.WARNING):
        compile_beside("kernels", jobs, cache, "key", 60)
    assert len(files(tmp_path, "job")) == 4
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "kernels: 4 parts are compiled in 2 processes"
    assert lines[-1].startswith("kernels: 4 of 4 parts compiled, ") and len(lines) > 2
    caplog.clear()
    compile_beside("kernels", jobs, cache, "key", 60)
    assert len(files(tmp_path, "job")) == 4 and not caplog.records, "they had run"
    compile_beside("kernels", jobs[:1], cache, "another version", 60)
    assert len(files(tmp_path, "job")) == 5


def test_a_job_that_would_end_with_its_starter_ends_well(tmp_path: Path, caplog) -> None:
    before = "from megatron_prefix.device.compile_pool import end_with_starter; end_with_starter()"
    with caplog.at_level(logging.INFO):
        compile_beside("kernels", [touch(tmp_path / "job", 0.2, before)], tmp_path, "key", 60)
    assert len(files(tmp_path, "job")) == 1 and "where it first runs" not in caplog.text


def test_what_fails_ends_nothing(tmp_path: Path, caplog) -> None:
    jobs = [["-c", "raise KeyError('no compiler')"], touch(tmp_path / "job")]
    with caplog.at_level(logging.INFO):
        compile_beside("kernels", jobs, tmp_path, "key", 60)
    assert len(files(tmp_path, "job")) == 1
    assert "where it first runs: KeyError: 'no compiler'" in caplog.text
    compile_beside("kernels", jobs, tmp_path, "key", 60)
    assert len(files(tmp_path, "job")) == 1, "it is not tried again"


def test_a_folder_that_cannot_be_written_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    compile_beside("kernels", [touch(tmp_path / "job")], tmp_path / "file", "key", 60)
    assert not files(tmp_path, "job")


def test_the_time_is_limited_and_nothing_is_left(tmp_path: Path, monkeypatch) -> None:
    """Not even what a job has started."""
    monkeypatch.setattr(compile_pool, "workers", lambda: 2)
    child = "import subprocess; one = subprocess.Popen(['sleep', '300'])"
    note = f"; open({str(tmp_path / 'child')!r} + str(one.pid), 'w')"
    jobs = [touch(tmp_path / "late", 300, child + note)] * 3
    begin = time.monotonic()
    compile_beside("kernels", jobs, tmp_path, "key", 4)
    assert time.monotonic() - begin < 30
    children = [int(path.name.removeprefix("child")) for path in files(tmp_path, "child")]
    assert len(children) == 2 and not files(tmp_path, "late")
    assert not any(map(is_alive, children))


def test_one_process_of_a_host_compiles_and_others_wait(tmp_path: Path) -> None:
    job = touch(tmp_path / "job", 1.0)
    program = asking(job, tmp_path, 60)
    asked = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    assert [one.wait(timeout=60) for one in asked] == [0, 0, 0]
    assert len(files(tmp_path, "job")) == 1


def test_a_process_that_waits_goes_on_without(tmp_path: Path) -> None:
    """Where another one has the lock until the time is over."""
    compile_beside("kernels", [], tmp_path, "key", 1)
    (lock,) = tmp_path.glob("*.lock")
    lock.with_suffix(".tried").unlink()
    holding = (
        f"import fcntl, time; f = open({str(lock)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX);"
        " print('held', flush=True); time.sleep(300)"
    )
    other = subprocess.Popen([sys.executable, "-c", holding], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        begin = time.monotonic()
        compile_beside("kernels", [touch(tmp_path / "job")], tmp_path, "key", 1)
        assert 0.9 < time.monotonic() - begin < 30 and not files(tmp_path, "job")
        assert not lock.with_suffix(".tried").exists(), "nothing was tried"
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_jobs_end_with_the_process_that_started_them(tmp_path: Path, how: int) -> None:
    before = "from megatron_prefix.device.compile_pool import end_with_starter; end_with_starter()"
    note = f"; open({str(tmp_path / 'pid')!r} + str(os.getpid()), 'w')"
    job = touch(tmp_path / "late", 300, before + note)
    program = asking(job, tmp_path, 300)
    asked = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 60
    while not files(tmp_path, "pid") and time.monotonic() < deadline:
        time.sleep(0.05)
    (noted,) = files(tmp_path, "pid")
    os.kill(asked.pid, how)
    asked.wait(timeout=30)
    worker = int(noted.name.removeprefix("pid"))
    while is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(worker)
