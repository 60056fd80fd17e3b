"""Files that a verb is asked to write and cannot: one line, before the work for them."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_prefix.lab.cli import bench, bench_memory, inputs, outputs
from megatron_prefix.lab.models import build
from tests.harness import data
from tests.harness.command_line import BUNDLED, failure

PLAN = str(data.REPOSITORY / "schedules" / "flat-group-pp1.csv")
BENCH = ["bench", "--shapes", "8:4:2"]
MEMORY = ["bench", "memory", "--shapes", "8:4:2"]
# Verb, and the option that takes the file (none: the last argument).
WRITERS = {
    "plan csv": ["plan", BUNDLED, "--csv"], "plan svg": ["plan", BUNDLED, "--svg"],
    "show svg": ["show", PLAN, "--svg"], "generate": ["generate"],
    "import": ["import", "tokens", BUNDLED], "bench json": [*BENCH, "--bench-json"],
    "bench plot": [*BENCH, "--plot"], "memory json": [*MEMORY, "--bench-json"],
    "memory plot": [*MEMORY, "--plot"], "matrix markdown": ["matrix", "--only", "*", "--markdown"],
    "matrix continue": ["matrix", "--only", "*", "--continue"],
    "replay json": ["replay", BUNDLED, "--result-json"],
    "replay plot": ["replay", BUNDLED, "--plot"], "train svg": ["train", BUNDLED, "--plan-svg"],
    "train trace": ["train", BUNDLED, "--trace"], "train output": ["train", BUNDLED, "--output"],
}  # fmt: skip
PLACES = {
    "file/x.png": "/file is not a folder", f"{'x' * 252}.png": "too long", "folder.png": "folder",
    "no/x.png": "/no is missing",
}  # fmt: skip
MAKES_FOLDERS = ("train", "matrix")


@pytest.fixture
def _no_work(monkeypatch):
    """Whoever builds a model has not looked at where the result goes."""

    def fail(*args, **kwargs):
        raise AssertionError("work was done first")

    monkeypatch.setattr(build, "build_model", fail)
    for module in (bench, bench_memory, inputs, outputs):
        monkeypatch.setattr(module, "watched", fail)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.usefixtures("_no_work")
def test_a_file_that_cannot_be_written_is_refused_first(capsys, tmp_path, name, place):
    arguments = WRITERS[name]
    if (arguments[0] in MAKES_FOLDERS and place == "no/x.png") or (
        name == "train output" and place == "folder.png"
    ):
        pytest.skip("the folder is made, or may be there")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    path = str(tmp_path / place)
    line = failure(capsys, *arguments, path)
    assert f"{path}: cannot be written (" in line and PLACES[place] in line
    assert sorted(tmp_path.iterdir()) == before


def test_a_disk_that_is_full(capsys):
    full = "/dev/full"
    for arguments in (
        ["plan", BUNDLED, "--csv", full],
        ["plan", BUNDLED, "--svg", full],
        ["show", PLAN, "--svg", full],
        ["generate", full, "--groups", "1"],
    ):
        assert "/dev/full: cannot be written (No space left" in failure(capsys, *arguments)
    assert Path(full).is_char_device()


@pytest.mark.parametrize("arguments", [["show", PLAN, "--json"], ["show", PLAN, "--full"]])
def test_stdout_on_a_full_disk(arguments):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "megatron_prefix", *arguments],
            cwd=data.REPOSITORY, stdout=full, stderr=subprocess.PIPE, check=False, text=True,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == (
        "megatron-prefix show: stdout: cannot be written (No space left on device)\n"
    )
