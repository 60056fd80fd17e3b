"""Files that are written whole or not at all, and places where none can be."""

import os
import resource
import stat
import threading

import pytest

from megatron_prefix.errors import UserError, bounded
from megatron_prefix.plan import files
from tests.harness.ranks import run_ranks

LONG = "x" * 256


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / ("n" * 255)  # the longest name that there can be
    files.write_text(path, "é")
    assert path.read_bytes() == "é".encode()
    with pytest.raises(ZeroDivisionError), files.replacing(path) as file:
        file.write(b"half" * (1 // 0))
    assert path.read_text("utf-8") == "é" and os.listdir(tmp_path) == [path.name]


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path):
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "file")
    files.write_text(link, "text")
    assert link.is_symlink() and (tmp_path / "file").read_text("utf-8") == "text"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.check_writable(pipe)
    files.write_text(pipe, "text")
    assert os.read(reader, 10) == b"text" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)


def test_a_small_file_is_read_whole_and_nothing_without_end(tmp_path):
    path, pipe = tmp_path / "file", tmp_path / "pipe"
    path.write_bytes("é\r\n".encode())
    assert files.read_text(path) == "é\r\n"
    os.mkfifo(pipe)
    assert files.read_whole(pipe) == b"", "nobody writes into it"
    read, write = os.pipe()
    writer = threading.Timer(0.2, lambda: (os.write(write, b"late"), os.close(write)))
    writer.start()
    assert files.read_whole(f"/dev/fd/{read}") == b"late"
    writer.join()
    os.close(read)
    for endless in ("/dev/zero", "/dev/urandom"):
        with pytest.raises(OSError, match="more than 64 MiB"):
            files.read_whole(endless)


def test_a_full_disk_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("before", "utf-8")

    def write():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(UserError) as caught:
            files.write_text(path, "x" * 5000)
        return str(caught.value)

    (line,) = run_ranks(1, write)
    assert (
        line == f"{path}: cannot be written (File too large); check the folder and the space left"
    )
    assert path.read_text("utf-8") == "before" and os.listdir(tmp_path) == ["file"]
    with pytest.raises(UserError, match="No space left on device"):
        files.write_text("/dev/full", "x")


@pytest.mark.parametrize(("name", "message"), [
    ("folder", "a folder has this name"), ("file/x", "/file is not a folder"),
    ("no/x", "/no is missing"), (LONG, "too long"), (f"{LONG}/x", "too long"),
    ("x/" * 5000, "too long"),
])  # fmt: skip
def test_places_that_cannot_be_written(tmp_path, name, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=message) as caught:
        files.check_writable(tmp_path / name)
    assert str(caught.value).startswith(bounded(f"{tmp_path / name}: cannot be written (")[:700])
    with pytest.raises(UserError, match="cannot be written"):
        files.write_text(tmp_path / name, "")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
