"""Checkpoints whose files are damaged, missing or made by somebody else; and disks that are full.

All runs of a kind share a process: starting one takes longer than ten of them.
"""

import io
import itertools
import json
import os
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import torch

from megatron_prefix.lab.rl.checkpoint_files import _IndexUnpickler
from tests.harness import fuzzing
from tests.harness.data import BUNDLED
from tests.harness.ranks import run_ranks

ARGUMENTS = (
    "train", str(BUNDLED), "--set", "num_layers=1", "--groups", "2", "--groups-per-step", "1",
    "--max-tokens", "40", "--json",
)  # fmt: skip
STEP = "checkpoints/step-000001"


class Payload:
    """A pickle of this makes a file when it is read."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def train(*arguments):
    """Exit code and stderr of `train` in this process."""
    return fuzzing.ended(*ARGUMENTS, *arguments)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good") / "run"
    arguments = ("--steps", "1", "--save-every", "1", "--output", str(folder))
    assert run_ranks(1, lambda: train(*arguments)) == [(0, "")]
    return folder


def resumed(good, folder, changes):
    """How resuming ends after each change: code, stderr, and whether the folder is as before."""

    def on_rank():
        found = {}
        for name, change in changes.items():
            run = folder / "run"
            shutil.copytree(good, run)
            change(run)
            before = sorted(run.rglob("*"))
            code, err = train("--steps", "2", "--output", str(run), "--resume")
            found[name] = code, err, sorted(run.rglob("*")) == before
            shutil.rmtree(run)
        return found

    return run_ranks(1, on_rank)[0]


def with_state(**values):
    """Changes fields of train.json; None drops one."""

    def change(run):
        path = run / STEP / "train.json"
        state = {**json.loads(path.read_text("utf-8")), **values}
        path.write_text(json.dumps({k: v for k, v in state.items() if v is not None}), "utf-8")

    return change


def content(name, make):
    return lambda run: (run / name).write_bytes(make((run / name).read_bytes()))


def in_shard(marker, run):
    """An entry of a shard that is not a tensor: the random generators."""
    index = pickle.loads((run / STEP / ".metadata").read_bytes())  # noqa: S301  # our own
    (place,) = (info for key, info in index.storage_data.items() if key.fqn.startswith("rng/"))
    buffer = io.BytesIO()
    torch.save(Payload(marker), buffer)
    shard = run / STEP / place.relative_path
    place.offset, place.length = shard.stat().st_size, buffer.tell()
    with open(shard, "ab") as file:
        file.write(buffer.getvalue())
    (run / STEP / ".metadata").write_bytes(pickle.dumps(index))


def test_code_in_a_checkpoint_does_not_run(good, tmp_path):
    marker = tmp_path / "marker"
    index, optimizer = pickle.dumps(Payload(marker)), {"optimizer": Payload(marker)}
    found = resumed(good, tmp_path, {
        ".metadata": lambda run: (run / STEP / ".metadata").write_bytes(index),
        "common.pt": lambda run: torch.save(optimizer, run / STEP / "common.pt"),
        ".distcp": lambda run: in_shard(marker, run),
    })  # fmt: skip
    assert not marker.exists()
    for name, (code, err, same) in found.items():
        assert (code, err.count("\n"), same) == (2, 1, True), err
        assert f"{name}: cannot be read" in err and "resume from another checkpoint" in err
    pickle.loads(pickle.dumps(Payload(marker)))  # noqa: S301  # else this proves nothing
    assert marker.exists()


# Members of enums, as Python 3.11.0 to 3.11.3 write them ------------------------------------------

CHECKPOINT = "torch.distributed.checkpoint"
FORMATS = f"c{CHECKPOINT}.metadata\n_MEM_FORMAT_ENCODING\n"
CHANNELS_LAST = "VTORCH_CHANNELS_LAST\n"


def getattr_of(*arguments):
    """The opcodes of a call of getattr; arguments are opcodes, too."""
    return f"cbuiltins\ngetattr\n({''.join(arguments)}tR"


def read(opcodes):
    return _IndexUnpickler(io.BytesIO(f"{opcodes}.".encode())).load()


@pytest.mark.parametrize("arguments", [
    (FORMATS, "V__class__\n"),
    (getattr_of(FORMATS, CHANNELS_LAST), "V__class__\n"),
    ("cbuiltins\ngetattr\n", "V__globals__\n"),
    # Enums and modules that do not belong into an index.
    (f"c{CHECKPOINT}.planner\nLoadItemType\n", "VTENSOR\n"),
    ("cos\npath\n", "Vjoin\n"),
], ids=lambda arguments: " ".join("".join(arguments).split()))  # fmt: skip
def test_getattr_reads_nothing_else(arguments):
    with pytest.raises(pickle.UnpicklingError, match="does not belong into"):
        read(getattr_of(*arguments))


def test_an_index_cannot_change_its_classes():
    """Else calls could reach Python's own getattr later that have not been seen here."""
    changed = f"c{CHECKPOINT}.metadata\nMetadata\n(N(dV__call__\ncbuiltins\ngetattr\nstb"
    with pytest.raises(pickle.UnpicklingError, match="does not belong into"):
        read(changed)


def test_damaged_files_are_named_in_one_line(good, tmp_path):
    names = ["train.json", "metadata.json", "common.pt", ".metadata", "__0_0.distcp"]
    files = [f"{STEP}/{name}" for name in names] + ["checkpoints/latest", "metrics.jsonl"]
    damage = {
        "junk": lambda path: path.write_bytes(b"\xff\x00junk\n" * 40),
        "cut": lambda path: os.truncate(path, path.stat().st_size * 2 // 3),
        "missing": lambda path: path.unlink(),
        "folder": lambda path: (path.unlink(), path.mkdir()),
        "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    }
    changes = {
        f"{name}: {kind}": lambda run, name=name, change=change: change(run / name)
        for name, (kind, change) in itertools.product(files, damage.items())
        if (name, kind) != ("metrics.jsonl", "pipe")  # whoever reads the pipe gets the metrics
    }
    shard = f"{STEP}/__0_0.distcp"
    changes[f"{shard}: one bit"] = content(
        shard, lambda old: old[:2000] + bytes([old[2000] ^ 1]) + old[2001:]
    )
    # A last line that was cut is one that a full disk, or the end of the power, leaves.
    harmless = {f"metrics.jsonl: {kind}" for kind in ("cut", "missing")}
    for case, (code, err, same) in resumed(good, tmp_path, changes).items():
        if case in harmless:
            assert (code, err) == (0, ""), case
            continue
        assert (code, err.count("\n"), same) == (2, 1, True), (case, err)
        name = case.partition(":")[0]
        assert name.rpartition("/")[2] in err, (case, err)
        assert any(word in err for word in ("resume", "move the file away", "check the")), err


def test_values_that_no_run_has_are_refused(good, tmp_path):
    other = json.loads((good / STEP / "train.json").read_text("utf-8"))["identity"]
    other["model"]["new"] = 7
    messages = {
        "step": (with_state(step=-5), "train.json: step is -5, not a number of any run"),
        "missing": (with_state(skipped_in_a_row=None), "train.json: skipped_in_a_row is None"),
        "position": (with_state(position=10**9),
                     "train.json: position 1000000000 of rollouts of 2 groups"),
        "newer": (with_state(format=2), "train.json: format 2, and this release reads 1; resume"),
        "identity": (with_state(identity=[]), "train.json: identity is missing"),
        "field": (with_state(identity=other),
                  "step-000001: was made with another model (new 7 there, unknown here); use the"),
        "latest": (content("checkpoints/latest", lambda old: b"../../etc"),
                   "latest: names no checkpoint ('../../etc'); name one: --resume"),
        "metrics": (content("metrics.jsonl", lambda old: old + b'{"step": "2"}\n'),
                    "metrics.jsonl:2: not a line of metrics (step is 2); move the file away"),
    }  # fmt: skip
    found = resumed(good, tmp_path, {name: change for name, (change, _) in messages.items()})
    for name, (code, err, same) in found.items():
        assert (code, err.count("\n"), same) == (2, 1, True), (name, err)
        assert messages[name][1] in err


# Full disks, and runs that are refused ------------------------------------------------------------


def test_a_full_disk_leaves_the_last_checkpoint(good, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(good, run)
    before = sorted((run / "checkpoints").rglob("*"))
    more = ("--steps", "2", "--save-every", "1", "--output", str(run), "--resume")

    def on_rank():
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        return train(*more)

    ((code, err),) = run_ranks(1, on_rank)
    last = err.splitlines()[-1]
    assert code == 2 and "/checkpoints/step-000002: the checkpoint cannot be written (" in last
    assert last.endswith("; step-000001 is there to --resume from; make space")
    assert sorted((run / "checkpoints").rglob("*")) == before
    assert run_ranks(1, lambda: train(*more)) == [(0, "")]
    assert (run / "checkpoints" / "latest").read_text("utf-8") == "step-000002\n"
