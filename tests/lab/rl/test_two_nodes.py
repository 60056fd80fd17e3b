"""Two nodes with a network between them: the same figures as on one, and what a cut does."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout
from tests.harness import forking_torchrun, namespaces
from tests.harness.command_line import forked
from tests.harness.data import BUNDLED, REPOSITORY
from tests.harness.namespaces import CABLE
from tests.harness.ranks import run_ranks
from tests.harness.training import assert_same, metrics_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        namespaces.refusal() is not None, reason=namespaces.refusal() or "nodes can be made"
    ),
]

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


class Ended(NamedTuple):
    """What a node's script left."""

    code: int
    out: str
    err: str


class Job:
    """A script of launch/ that has been started on each of these nodes, with this torchrun."""

    def __init__(self, script, arguments, nodes, torchrun, **variables):
        command = ["bash", str(REPOSITORY / "launch" / script), *arguments]
        common = {
            **os.environ, "VENV": str(torchrun),
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": CABLE,
            "NNODES": str(len(nodes)), "MASTER_ADDR": nodes[0].name, **variables,
        }  # fmt: skip
        self._processes = [
            subprocess.Popen(
                node.inside(*command), env=common | {"NODE_RANK": str(number)}, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for number, node in enumerate(nodes)
        ]  # fmt: skip

    def runs(self):
        return all(process.poll() is None for process in self._processes)

    def ended(self):
        """Waits for the end on every node."""
        try:
            told = [process.communicate(timeout=240) for process in self._processes]
        finally:
            for process in self._processes:
                process.kill()
        codes = [process.returncode for process in self._processes]
        return [Ended(code, *text) for code, text in zip(codes, told, strict=True)]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with namespaces.two_nodes(tmp_path_factory.mktemp("nodes")) as both:
        yield both


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory):
    """Of nodes with several ranks each."""
    return forking_torchrun.made(tmp_path_factory.mktemp("torchrun"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run of four ranks on this host."""
    folder = tmp_path_factory.mktemp("undisturbed")
    more = ["--distributed-optimizer", "--output", str(folder), "--steps", str(STEPS)]
    done = here("train", str(BUNDLED), *TRAIN, *more)
    assert done["last_step"] == STEPS
    return folder


def here(*arguments):
    """What a verb prints that starts its ranks itself, on one node."""
    done = forked(*arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


class Cut(NamedTuple):
    """A run on two nodes whose network was cut."""

    folder: Path
    ended: list[Ended]
    seconds: float  # from the cut to the end of both


@pytest.fixture(scope="module")
def cut(nodes, torchrun, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut")
    variables = {"NGPU": "2", "STEPS": str(STEPS), "OUTPUT": str(folder)}
    job = Job("train_multinode.sh", TRAIN, nodes, torchrun, **variables)
    while job.runs() and num_steps(folder) < CUT:
        time.sleep(0.01)
    nodes[1].cut()
    begin = time.monotonic()
    ended = job.ended()
    seconds = time.monotonic() - begin
    nodes[1].mend()
    return Cut(folder, ended, seconds)


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
    for mine, other, done in zip("ab", "ba", cut.ended, strict=True):
        assert done.code == 1, done.err[-3000:]
        assert "trainer.step()" in done.err, "it was in the middle of a step"
        said = [line for line in done.err.splitlines() if line.startswith("megatron-prefix train")]
        theirs = "2, 3" if other == "b" else "0, 1"
        assert re.match(rf"megatron-prefix train: rank \d on node-{mine} has lost a rank", said[0])
        assert f"other hosts have {theirs} on node-{other}" in said[0]
        assert "or it needs longer than --message-timeout-minutes" in said[0]
    assert cut.seconds < LIMIT_S + SOON_S


def test_two_nodes_compute_what_one_does(cut, undisturbed):
    """Bit by bit, up to the cut."""
    theirs, ours = metrics_of(undisturbed), metrics_of(cut.folder)
    assert len(theirs) == STEPS and CUT <= len(ours) < STEPS
    assert ours == theirs[: len(ours)]
    assert len({row["train/grad_norm"] for row in ours}) == len(ours)
    saved = f"checkpoints/step-{SAVED:06d}"
    assert_same(tensors(undisturbed / saved), tensors(cut.folder / saved))


SCRIPT = REPOSITORY / "launch" / "two_nodes.sh"


@pytest.fixture
def temporary():
    """A folder with a name short enough for the sockets that Megatron's writers have there."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextlib.contextmanager
def script(output, temporary, *arguments, **variables):
    """The script, with the folders of its results and its temporary files."""
    environment = {
        **os.environ, "VENV": str(Path(sys.executable).parents[1]), "TMPDIR": str(temporary),
        "OUTPUT": str(output), "NGPU": "1", **variables,
    }  # fmt: skip
    with subprocess.Popen(
        ["bash", str(SCRIPT), *arguments], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # bash cannot trap what it was started to ignore, as jobs in the background are.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    ) as started:  # fmt: skip
        yield started


def test_a_restart_reaches_what_an_undisturbed_run_does(cut, undisturbed, torchrun, temporary):
    """By one command, of which nothing stays."""
    networks = set(os.listdir("/sys/class/net"))
    variables = {"NGPU": "2", "STEPS": str(STEPS), "VENV": str(torchrun)}
    with script(cut.folder, temporary, "train", *TRAIN, **variables) as started:
        out, err = started.communicate(timeout=240)
    assert started.returncode == 0, err[-3000:]
    told = json.loads(out)  # rank 0 speaks
    assert (told["first_step"], told["last_step"]) == (SAVED + 1, STEPS)
    last = f"checkpoints/step-{STEPS:06d}"
    assert_same(tensors(undisturbed / last), tensors(cut.folder / last))
    assert metrics_of(cut.folder)[-1] == metrics_of(undisturbed)[-1]
    assert not os.listdir(temporary)
    assert set(os.listdir("/sys/class/net")) == networks
