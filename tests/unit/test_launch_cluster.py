"""Scripts for clusters: what they ask torchrun for, and two nodes that are one machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_prefix.cli.main import make_parser
from megatron_prefix.models.presets import PRESETS, resolve
from megatron_prefix.runtime.layout import Layout
from tests.harness.data import BUNDLED, REPOSITORY
from tests.unit.test_launch_scripts import Sandbox

LAUNCH = REPOSITORY / "launch"
MODELS = sorted(path.stem for path in (LAUNCH / "models").glob("*.sh"))
SCRIPTS = sorted([*LAUNCH.rglob("*.sh"), LAUNCH / "train.sbatch"])
CLUSTER = [
    LAUNCH / name
    for name in "arguments.sh train_1node.sh train_multinode.sh align_cluster.sh".split()
]


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder for PATH whose commands only say what they were asked."""
    for name in ("torchrun", "srun", "scontrol", "megatron-prefix"):
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\necho "{name}" "$@"\n', encoding="utf-8")
        path.chmod(0o755)
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'node7\\nnode8\\n'\n", encoding="utf-8")
    return tmp_path


def asked(commands: Path, script: str, *arguments: str, **environment: str) -> list[str]:
    """The words of the one command that a script runs."""
    done = subprocess.run(
        ["bash", str(LAUNCH / script), *arguments],
        env={"PATH": f"{commands}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return shlex.split(line)


def verb_of(words: list[str]) -> list[str]:
    """What follows `-m megatron_prefix`."""
    return words[words.index("-m") + 2 :]


# What they ask for --------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [None, "models/Qwen3-8B"])
def test_weights_are_asked_for_by_name(commands, folder):
    given = {} if folder is None else {"LOAD_HF": folder}
    words = verb_of(asked(commands, "train_1node.sh", MODEL="qwen3-8b", **given))
    assert make_parser("train").parse_args(words).load_hf == folder


@pytest.mark.parametrize("model", MODELS)
def test_every_model_trains_with_arguments_that_the_verb_takes(commands, model):
    words = verb_of(asked(commands, "train_multinode.sh", MODEL=model, NGPU="8"))
    args = make_parser("train").parse_args(words)
    spec = resolve(args.model)
    assert args.model == model and model in PRESETS
    assert args.prefix_schedule == "auto" and args.dtype == "bfloat16" and args.device == "cuda"
    assert args.rollouts == [str(BUNDLED)]
    layout = Layout.fill(
        world_size=16, tp=args.tp, pp=args.pp, ep=args.ep, dp=args.dp,
        sequence_parallel=args.sequence_parallel,
    )  # fmt: skip
    assert spec.num_layers % layout.pp == 0 and spec.num_query_groups % layout.tp == 0
    assert spec.is_moe == (layout.ep > 1)
    assert args.chunk_tokens % layout.alignment == 0


def test_one_node_needs_no_address(commands):
    words = asked(commands, "train_1node.sh", "--tp", "2", NGPU="4", PREFIX_SCHEDULE="on")
    assert words[:4] == ["torchrun", "--standalone", "--nproc-per-node", "4"]
    args = make_parser("train").parse_args(verb_of(words))
    assert (args.prefix_schedule, args.tp) == ("on", 2), "arguments win"


def test_several_nodes_meet_at_one_address(commands):
    words = asked(
        commands, "train_multinode.sh", NNODES="3", NGPU="4", MASTER_ADDR="node1",
        MASTER_PORT="1234", JOB_ID="j7", OUTPUT="here", STEPS="5", LR="3e-6", ROLLOUTS="mine",
    )  # fmt: skip
    assert words[: words.index("-m")] == shlex.split(
        "torchrun --nnodes 3 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint node1:1234"
        " --rdzv-id j7"
    )
    args = make_parser("train").parse_args(verb_of(words))
    assert (args.rollouts, args.output, args.steps, args.lr) == (["mine"], "here", 5, 3e-6)
    assert args.resume == "auto" and args.save_every and args.distributed_optimizer


def test_the_cluster_is_aligned_by_one_matrix(commands):
    words = asked(commands, "align_cluster.sh", "--only", "dense/PP*", NNODES="2")
    assert words[:3] == ["torchrun", "--nnodes", "2"]
    args = make_parser("matrix").parse_args(verb_of(words))
    assert (args.device, args.only) == ("cuda", ["dense/PP*"])
    assert args.markdown == "runs/align_cluster/matrix.md"
    assert not args.allow_refused


def test_slurm_names_the_first_node(commands):
    words = asked(
        commands, "train.sbatch", "--tp", "2", SLURM_JOB_NODELIST="node[7-8]", SLURM_JOB_ID="42",
        SLURM_JOB_NUM_NODES="2", SLURM_SUBMIT_DIR="/project",
    )  # fmt: skip
    assert words == ["srun", "bash", "/project/launch/train_multinode.sh", "--tp", "2"]
    (commands / "srun").write_text(
        "#!/bin/sh\necho $NNODES $NGPU $MASTER_ADDR $JOB_ID\n", encoding="utf-8"
    )
    seen = asked(
        commands, "train.sbatch", SLURM_JOB_NODELIST="node[7-8]", SLURM_JOB_ID="42",
        SLURM_JOB_NUM_NODES="2", SLURM_SUBMIT_DIR="/project",
    )  # fmt: skip
    assert seen == ["2", "8", "node7", "42"]


def test_another_model_is_an_error(commands):
    done = subprocess.run(
        ["bash", str(LAUNCH / "train_1node.sh")],
        env={"PATH": f"{commands}:{os.environ['PATH']}", "MODEL": "gpt-5"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "gpt-5" in done.stderr and done.stdout == ""


def test_the_matrix_goes_on_where_it_stopped(tmp_path):
    sandbox = Sandbox(tmp_path)
    done = sandbox.run("bash", "launch/align_matrix.sh", "--only", "moe/*", OUTPUT="there")
    assert done.returncode == 0, done.stderr
    assert sandbox.asked[-1] == (
        "megatron-prefix matrix --continue there/rows.jsonl --markdown there/matrix.md --only moe/*"
    )


def test_one_release_after_the_other(tmp_path):
    sandbox = Sandbox(tmp_path)
    done = sandbox.run("bash", "launch/test_versions.sh", "0.17.1", "0.19.2", TESTS="a b")
    assert done.returncode == 0, done.stderr
    begins = ("-m pip install --quiet", "python -m pytest")
    pins = (LAUNCH / "requirements-cpu.txt").read_text(encoding="utf-8").splitlines()
    (triton,) = [line for line in pins if line.startswith("triton")]
    assert [line for line in sandbox.asked if line.startswith(begins)] == [
        f"-m pip install --quiet --no-deps megatron-core==0.17.1 {triton}",
        "python -m pytest -q a b",
        f"-m pip install --quiet --no-deps megatron-core==0.19.2 {triton}",
        "python -m pytest -q a b",
    ]
    told = [line for line in done.stdout.splitlines() if line.startswith("megatron-core")]
    assert [line.split()[1] for line in told] == ["0.17.1:", "0.19.2:"]


# How they are written -----------------------------------------------------------------------------


@pytest.mark.parametrize("script", CLUSTER, ids=lambda path: path.name)
def test_arguments_and_no_logic(script):
    text = script.read_text(encoding="utf-8")
    assert not re.search(r"^\s*(if|for|while|case|function)\b|\(\)\s*\{|pkill|killall", text, re.M)
    if script.name != "arguments.sh":
        assert text.count("\ntorchrun ") == 1


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_it(script):
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


def test_shellcheck_has_nothing_to_say():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(
        ["shellcheck", *map(str, SCRIPTS)], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


# Two nodes ----------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def on_two_nodes(
    script: str, arguments: list[str], folder: Path, ranks: int
) -> list[tuple[int, str, str]]:
    """Starts a script twice, as its two nodes do; per node exit code, stdout and stderr."""
    environment = {
        **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NNODES": "2", "NGPU": str(ranks), "JOB_ID": "two nodes",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "OUTPUT": str(folder),
    }  # fmt: skip
    nodes = [
        subprocess.Popen(
            ["bash", str(LAUNCH / script), *arguments], env=environment, cwd=folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        told = [node.communicate(timeout=240) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    return [(node.returncode, *text) for node, text in zip(nodes, told, strict=True)]


def test_train_on_two_nodes(tmp_path):
    arguments = shlex.split(
        "--device cpu --model tiny-llama --dtype float32 --tp 2 --pp 1 --recompute none --steps 2"
        " --groups 2 --max-tokens 96 --chunk-tokens 32 --save-every 0 --prefix-schedule on --json"
    )
    found = on_two_nodes("train_multinode.sh", arguments, tmp_path, ranks=2)
    for code, _, err in found:
        assert code == 0, err[-2000:]
    (told,) = [out for _, out, _ in found if out.strip()]  # rank 0 speaks, wherever it is
    summary = json.loads(told)
    assert summary["last_step"] == 2
    assert 0 < summary["executed_tokens"] < summary["raw_tokens"]
    rows = [
        json.loads(line)
        for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["prefix_sharing/active"] == 1


def test_align_on_two_nodes(tmp_path):
    """Span after row in one world; the second row joins where the first has left."""
    rows = ["dense/DP2/flat/none", "dense/PP2/chunked/none"]
    document = tmp_path / "matrix.md"
    arguments = ["--device", "cpu", "--only", *rows, "--json", "--markdown", str(document)]
    found = on_two_nodes("align_cluster.sh", arguments, tmp_path, ranks=1)
    for code, _, err in found:
        assert code == 0, err[-2000:]
    (told,) = [out for _, out, _ in found if out.strip()]
    result = json.loads(told)
    assert result["counts"] == {"aligned": 2}
    assert sorted(row["row"] for row in result["rows"]) == rows
    assert "2 rows: 2 aligned" in document.read_text(encoding="utf-8")
