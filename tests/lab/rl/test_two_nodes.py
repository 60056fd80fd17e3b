"""Two nodes with a network between them: the same figures as on one, and what a cut does."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout
from tests.harness import forking_torchrun
from tests.harness.command_line import printed
from tests.harness.data import BUNDLED, REPOSITORY
from tests.harness.ranks import run_ranks
from tests.harness.training import assert_same, metrics_of

pytestmark = pytest.mark.slow
LIMIT_S = 15
"""How long a rank waits for a message."""
SOON_S = 30
"""Longer than a loaded machine needs to end two ranks and torchrun."""
STEPS, SAVED, CUT = 4, 2, 3
"""Steps of a run, the one that is saved, and the one behind which the network is cut."""
TRAIN = shlex.split(
    "--device cpu --model tiny-llama --dtype float32 --tp 2 --sequence-parallel --pp 2 --json"
    " --recompute none --set num_layers=2 --groups 1 --max-tokens 96 --chunk-tokens 32"
    " --segment-tokens 64 --lr 1e-2"
    f" --prefix-schedule on --save-every {SAVED}"
    f" --message-timeout-minutes {LIMIT_S / 60}"
)


@pytest.fixture(scope="module")
def temporary():
    """A folder with a name short enough for the sockets that Megatron's writers have there."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def start(temporary, tmp_path_factory):
    """Starts the script that makes two nodes of namespaces, with the folder of its results."""
    torchrun = forking_torchrun.made(tmp_path_factory.mktemp("torchrun"))
    common = {**os.environ, "VENV": str(torchrun), "TMPDIR": str(temporary), "STEPS": str(STEPS)}

    def started(output):
        job = subprocess.Popen(
            ["bash", str(REPOSITORY / "launch" / "two_nodes.sh"), "train", *TRAIN], text=True,
            env=common | {"OUTPUT": str(output)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        ends.callback(job.kill)
        return job

    with contextlib.ExitStack() as ends:
        yield started


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    more = ["--distributed-optimizer", "--output", str(folder), "--steps", str(STEPS)]
    assert printed("train", str(BUNDLED), *TRAIN, *more)["last_step"] == STEPS
    return folder


class Cut(NamedTuple):
    """A run on two nodes whose network was cut."""

    folder: Path
    code: int
    err: str
    seconds: float  # from the cut to the end of both


@pytest.fixture(scope="module")
def cut(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut")
    job = start(folder)
    while job.poll() is None and num_steps(folder) < CUT:
        time.sleep(0.01)
    if job.returncode == 2:  # the script's own refusal
        pytest.skip(job.communicate()[1].strip())
    inside = ["nsenter", "--target", last_process(job.pid), "--net"]
    subprocess.run([*inside, "ip", "link", "set", "cable", "down"], check=True, timeout=60)
    begin = time.monotonic()
    _, err = job.communicate(timeout=240)
    return Cut(folder, job.returncode, err, time.monotonic() - begin)


def last_process(number):
    """Of those that a process has started: here a rank of the second node."""
    children = Path(f"/proc/{number}/task/{number}/children").read_text("utf-8").split()
    return last_process(children[-1]) if children else str(number)


def num_steps(folder):
    metrics = folder / "metrics.jsonl"
    return metrics.read_text(encoding="utf-8").count("\n") if metrics.exists() else 0


def tensors(checkpoint):
    """Weights and optimizer state of a checkpoint, whole."""

    def on_rank():
        runtime.initialize(Layout())
        from megatron.core import dist_checkpointing

        found = dist_checkpointing.load_plain_tensors(str(checkpoint))
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    return run_ranks(1, on_rank)[0]


def test_a_cut_network_ends_both_nodes_and_names_the_other(cut):
    assert cut.code == 1, cut.err[-3000:]
    assert cut.err.count("trainer.step()") > 1, "both were in the middle of a step"
    for mine, other, theirs in (("a", "b", "2, 3"), ("b", "a", "0, 1")):
        lost = rf"^megatron-prefix train: rank \d on node-{mine} has lost a rank.*$"
        said = re.search(lost, cut.err, re.M)[0]
        assert f"other hosts have {theirs} on node-{other}" in said
        assert "or it needs longer than --message-timeout-minutes" in said
    assert cut.seconds < LIMIT_S + SOON_S


def test_two_nodes_compute_what_one_does(cut, undisturbed):
    """Bit by bit, up to the cut."""
    theirs, ours = metrics_of(undisturbed), metrics_of(cut.folder)
    assert len(theirs) == STEPS and CUT <= len(ours) < STEPS
    assert ours == theirs[: len(ours)]
    assert len({row["train/grad_norm"] for row in ours}) == len(ours)
    saved = f"checkpoints/step-{SAVED:06d}"
    assert_same(tensors(undisturbed / saved), tensors(cut.folder / saved))


def test_a_restart_reaches_what_an_undisturbed_run_does(cut, undisturbed, start, temporary):
    """By the same command, of which nothing stays."""
    networks = set(os.listdir("/sys/class/net"))
    job = start(cut.folder)
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, err[-3000:]
    told = json.loads(out)  # rank 0 speaks
    assert (told["first_step"], told["last_step"]) == (SAVED + 1, STEPS)
    last = f"checkpoints/step-{STEPS:06d}"
    assert_same(tensors(undisturbed / last), tensors(cut.folder / last))
    assert metrics_of(cut.folder)[-1] == metrics_of(undisturbed)[-1]
    assert not os.listdir(temporary)
    assert set(os.listdir("/sys/class/net")) == networks
