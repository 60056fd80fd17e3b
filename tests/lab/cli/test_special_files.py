"""Devices and pipes where a verb reads a file: one line, no wait, and little memory."""

import gzip
import os
import resource
import threading
from pathlib import Path

import pytest

from tests.harness import fuzzing
from tests.harness.command_line import BUNDLED
from tests.harness.ranks import run_ranks

MEMORY = 4 << 30
COMMANDS = {
    "rollouts": ["plan", "FILE"], "model": ["plan", BUNDLED, "--model", "FILE"],
    "weights": ["train", BUNDLED, "--load-hf", "FOLDER"], "plan": ["show", "FILE"],
    "costs": ["train", BUNDLED, "--cost-file", "FILE", "--output", "OUT"],
    "record": ["matrix", "--only", "*", "--continue", "FILE"],
    "import": ["import", "tokens", "FILE", "OUT"],
}  # fmt: skip


def limited():
    """Lets this process have a little more memory than it has."""
    have = int(Path("/proc/self/statm").read_text("utf-8").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (have + MEMORY, have + MEMORY))


def refusals(folder, name):
    """How each command ends with this file, on one rank."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").symlink_to(name)
    names = {"FILE": name, "FOLDER": str(folder / "model"), "OUT": str(folder / "out.jsonl")}

    def on_rank():
        limited()
        return {
            what: fuzzing.ended(*[names.get(word, word) for word in command])
            for what, command in COMMANDS.items()
        }

    return run_ranks(1, on_rank, timeout_s=90)[0]


@pytest.mark.parametrize("kind", ["zeros", "pipe"])
def test_a_special_file_is_refused_in_one_line(tmp_path, kind):
    path = Path("/dev/zero") if kind == "zeros" else tmp_path / "pipe"
    if kind == "pipe":
        os.mkfifo(path)
    for what, (code, err) in refusals(tmp_path, str(path)).items():
        assert (code, err.count("\n")) == (2, 1), (what, err)
        assert len(err) < 600, what
        assert (str(path) in err) == (what != "weights"), err


@pytest.mark.parametrize("packed", [True, False])
def test_rollouts_may_come_through_a_pipe(packed):
    """`plan <(zcat rollouts.jsonl.gz)`, packed or not."""
    content = Path(BUNDLED).read_bytes()
    if not packed:
        content = gzip.decompress(content)
    read, write = os.pipe()

    def feed():
        with os.fdopen(write, "wb") as file:
            file.write(content)

    writer = threading.Thread(target=feed)
    writer.start()
    assert fuzzing.ended("plan", f"/dev/fd/{read}", "--json") == (0, "")
    os.close(read)
    writer.join()
