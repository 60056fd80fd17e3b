"""Scripts for clusters: what they ask torchrun for. tests/lab/rl/test_two_nodes.py runs them."""

import os
import re
import shlex
import shutil
import subprocess

import pytest

from megatron_prefix.lab.cli import train
from megatron_prefix.lab.cli.main import main, make_parser
from megatron_prefix.lab.plans.dealing import deal
from megatron_prefix.lab.rl.dataset import RolloutSet, minibatches
from megatron_prefix.lab.rl.trainer import check_layout
from tests.harness.command_line import script as run_script
from tests.harness.data import REPOSITORY

LAUNCH = REPOSITORY / "launch"
MODELS = sorted(path.stem for path in (LAUNCH / "models").glob("*.sh"))
SCRIPTS = sorted([*LAUNCH.rglob("*.sh"), LAUNCH / "train.sbatch", REPOSITORY / ".ci" / "run"])
NODE = {"NODE_RANK": "0", "MASTER_ADDR": "node0"}


@pytest.fixture
def commands(tmp_path):
    """An environment's folder of commands that only say what they were asked, on 8 GPUs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    says = {name: f'echo "{name}" "$@"' for name in ("torchrun", "srun", "megatron-prefix")}
    says |= {"scontrol": "printf 'node7\\nnode8\\n'", "python3": 'echo "${FAKE_GPUS:-8}"'}
    for name, line in says.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    return folder


def beside(commands):
    """Variables with which scripts take that environment."""
    return {"PATH": f"{commands}:{os.environ['PATH']}", "VENV": str(commands.parent), **NODE}


def asked(commands, script, *arguments, **environment):
    """The words of the one command that a script runs."""
    done = run_script(LAUNCH / script, *arguments, **{**beside(commands), **environment})
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return shlex.split(line)


def verb_of(words):
    return words[words.index("-m") + 2 :]


# Two nodes of 8 GPUs have what every model of launch/models needs; one has it for these.
DEFAULTS = [("train_multinode.sh", model) for model in MODELS]
DEFAULTS += [("train_1node.sh", model) for model in ("llama3-8b", "qwen3-8b")]


@pytest.mark.parametrize(("script", "model"), DEFAULTS)
def test_no_default_of_training_ends_in_a_refusal(commands, monkeypatch, capsys, script, model):
    """All that is refused before a model is built, for every step: the scripts need GPUs."""
    output = commands / "runs"
    words = verb_of(asked(commands, script, MODEL=model, OUTPUT=str(output)))
    args = make_parser("train").parse_args(words)
    in_a_world_of(16 if script == "train_multinode.sh" else 8, monkeypatch)
    training = train._training(args)
    job, settings, config = training.job, training.settings, training.settings.prefix
    rollouts = RolloutSet(job.groups)
    check_layout(settings, rollouts, job.layout)
    position = 0
    for _ in range(training.run.steps):
        groups = rollouts.take(position, settings.groups_per_step)
        position = (position + len(groups)) % len(rollouts.groups)
        for part in minibatches(groups, settings.num_minibatches):
            deal(part, job.spec, job.layout, config, stock=config.mode != "on")
    lengths = [f"--max-tokens={args.max_tokens}", f"--chunk-tokens={args.chunk_tokens}"]
    lengths += [f"--segment-tokens={args.segment_tokens}", f"--pp={args.pp}", "--json"]
    assert main(["plan", *args.rollouts, *lengths]) == 0, capsys.readouterr().err


def in_a_world_of(size, monkeypatch):
    """As a rank of torchrun sees it."""
    for name, value in dict(RANK=0, WORLD_SIZE=size, MASTER_ADDR="a", MASTER_PORT=1).items():
        monkeypatch.setenv(name, str(value))


def test_one_node_needs_no_address(commands):
    words = asked(commands, "train_1node.sh", "--tp", "2", NGPU="4", PREFIX_SCHEDULE="on")
    assert words[:4] == ["torchrun", "--standalone", "--nproc-per-node", "4"]
    args = make_parser("train").parse_args(verb_of(words))
    assert (args.prefix_schedule, args.tp) == ("on", 2), "arguments win"


def test_several_nodes_meet_at_one_address(commands):
    words = asked(
        commands, "train_multinode.sh", NNODES="3", NODE_RANK="2", NGPU="4", MASTER_ADDR="node1",
        MASTER_PORT="1234", OUTPUT="here", STEPS="5", LR="3e-6", ROLLOUTS="mine",
    )  # fmt: skip
    assert words[: words.index("-m")] == shlex.split(
        "torchrun --nnodes 3 --node-rank 2 --nproc-per-node 4 --master-addr node1"
        " --master-port 1234"
    )
    args = make_parser("train").parse_args(verb_of(words))
    assert (args.rollouts, args.output, args.steps, args.lr) == (["mine"], "here", 5, 3e-6)
    assert args.resume == "auto" and args.save_every and args.distributed_optimizer


@pytest.mark.parametrize("script", ["train_multinode.sh", "align_cluster.sh"])
@pytest.mark.parametrize("missing", NODE)
def test_a_node_needs_its_number_and_the_address_of_the_first(commands, script, missing):
    done = run_script(LAUNCH / script, **{**beside(commands), missing: ""})
    assert done.returncode != 0 and done.stdout == ""
    assert re.fullmatch(rf".*: {missing}: .*of.* node.*\n", done.stderr)


def test_slurm_names_the_first_node(commands):
    words = asked(
        commands, "train.sbatch", "--tp", "2", SLURM_JOB_NODELIST="node[7-8]",
        SLURM_JOB_NUM_NODES="2", SLURM_SUBMIT_DIR="/project",
    )  # fmt: skip
    assert words == ["srun", "bash", "/project/launch/train_multinode.sh", "--tp", "2"]


def refusal(script, *arguments, **environment):
    """The one line with which a script ends before it has started anything."""
    done = run_script(script, *arguments, **environment)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{script}: ")
    return line


GPU_SCRIPTS = ["train_1node.sh", "train_multinode.sh", "align_cluster.sh"]


@pytest.mark.parametrize("script", GPU_SCRIPTS)
def test_one_line_says_that_there_are_too_few_gpus(commands, script):
    environment = beside(commands)
    line = refusal(LAUNCH / script, **environment, FAKE_GPUS="0")
    assert "torch sees no GPU here" in line and "launch/two_nodes.sh" in line
    line = refusal(LAUNCH / script, **environment, FAKE_GPUS="4")
    assert line.endswith("torch sees 4 GPUs here, not 8; set NGPU=4")
    asked(commands, script, FAKE_GPUS="4", NGPU="4")
    for cpu in (["--device", "cpu"], ["--device=cpu"]):
        assert asked(commands, script, *cpu, FAKE_GPUS="0")[0] == "torchrun"
    (commands / "python3").write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    assert "cannot import torch; bash launch/quick" in refusal(LAUNCH / script, **environment)


def test_bash_reads_scripts_and_shellcheck_has_nothing_to_say():
    for script in SCRIPTS:
        assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    scripts = [*SCRIPTS, *(REPOSITORY / "benchmarks").glob("nccl_rows.sh")]
    done = subprocess.run(
        ["shellcheck", *map(str, scripts)], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
