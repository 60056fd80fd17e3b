"""The scripts of launch/ and .ci/, with an interpreter that only notes what it is asked to do;
those for clusters (tests/lab/rl/test_two_nodes.py runs them): what they ask torchrun for."""

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
from tests.harness.data import BUNDLED, REPOSITORY

# Stands in for Python: makes an environment that holds itself, notes installs and what is run.
STAND_IN = """\
#!/bin/sh
case "$*" in
    *EXT_SUFFIX*) echo "${FAKE_SUFFIX:-.cpython-311.so}" ;;
    *purelib*) mkdir -p "${0%/*}/packages" && echo "${0%/*}/packages" ;;
    *python_version*) echo "${FAKE_VERSION:-3.11.7}" ;;
    *version_info*) [ "${FAKE_VERSION:-new}" = new ] ;;
    *"import venv"*) [ "${FAKE_VENV:-there}" = there ] ;;
    "-m venv"*)
        while [ $# -gt 1 ]; do shift; done
        mkdir -p "$1/bin" && cp "$0" "$1/bin/python" && cp "$0" "$1/bin/megatron-prefix"
        touch "$1/pyvenv.cfg" ;;
    "-m pip install"*) echo "$*" >>"$NOTES"; [ "${FAKE_PIP:-works}" = works ] ;;
    "-c ") ;;
    *) echo "$(basename "$0") $*" >>"$NOTES" ;;
esac
"""


class Sandbox:
    """A copy of the scripts beside a stand-in for Python."""

    def __init__(self, folder):
        self.folder, self.notes, self.python = folder, folder / "notes", folder / "python3"
        self.root, self.venv = folder / "repository", folder / "environment"
        self.root.mkdir()
        for name in ("launch", ".ci"):
            shutil.copytree(REPOSITORY / name, self.root / name)
        shutil.copy(REPOSITORY / "setup.cfg", self.root)
        self.python.write_text(STAND_IN, encoding="utf-8")
        self.python.chmod(0o755)

    def run(self, *command, **environment):
        """`command` in the copy; what it asked of Python is in `asked` afterwards."""
        self.notes.write_text("", encoding="utf-8")
        environment = {"PYTHON": str(self.python), "VENV": str(self.venv), **environment}
        return subprocess.run(
            command, cwd=self.root,
            env={"PATH": os.environ["PATH"], "NOTES": str(self.notes), **environment},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    @property
    def asked(self):
        return self.notes.read_text(encoding="utf-8").splitlines()

    @property
    def installs(self):
        return [line for line in self.asked if line.startswith("-m pip install")]


@pytest.fixture
def sandbox(tmp_path):
    return Sandbox(tmp_path)


def test_torch_comes_first_then_the_package_with_its_extras(sandbox):
    done = sandbox.run("bash", "launch/test.sh", "-k", "some test")
    assert done.returncode == 0, done.stderr
    first, second, compiled, last = sandbox.asked
    pins = f"-c {sandbox.root}/launch/requirements-cpu.txt"
    assert pins in first and " torch " in first and pins in second
    assert second.endswith(f"--no-build-isolation --editable {sandbox.root}[test]")
    assert compiled.startswith("python -m compileall") and "--no-compile" in first
    assert last == "python -m pytest -k some test"


def test_what_is_there_is_not_installed_again(sandbox):
    """A broken install is none; other pins and other extras are."""
    assert sandbox.run("bash", "launch/test.sh", FAKE_PIP="breaks").returncode != 0
    assert len(sandbox.installs) == 1
    for num in (2, 0):
        assert sandbox.run("bash", "launch/test.sh").returncode == 0
        assert len(sandbox.installs) == num
    with (sandbox.root / "launch" / "requirements-cpu.txt").open("a", encoding="utf-8") as pins:
        pins.write("another==1.0\n")
    sandbox.run("bash", "launch/test.sh")
    assert len(sandbox.installs) == 2
    assert sandbox.run("bash", "launch/quickstart.sh").returncode == 0
    assert sandbox.installs[1].endswith("[train,plot]")


QUICK_CUT = "--chunk-tokens 512"
"""Of the quick start, as tests/repository/test_documents.py runs it."""


def test_the_quick_start_shows_both_schedules(sandbox):
    done = sandbox.run("bash", "launch/quickstart.sh", STEPS="2", OUTPUT="elsewhere")
    assert done.returncode == 0, done.stderr
    command = sandbox.asked[-1]
    bundled = sandbox.root / BUNDLED.relative_to(REPOSITORY)
    assert command.startswith(f"megatron-prefix train {bundled} --model tiny-llama --set ")
    assert "--compare" in command and "--prefix-schedule on" in command and QUICK_CUT in command
    assert "--steps 2" in command and "--plan-svg elsewhere/plan.svg" in command


@pytest.mark.parametrize(("environment", "reason"), [
    ({"PYTHON": "python9.9"}, "there is no python9.9 here"),
    ({"FAKE_VERSION": "3.9.18"}, "is Python 3.9.18, 3.10 is the oldest"),
    ({"FAKE_VENV": "missing"}, "lacks venv"),
])  # fmt: skip
def test_one_line_says_what_a_python_lacks(sandbox, environment, reason):
    done = sandbox.run("bash", "launch/test.sh", **environment)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert reason in done.stderr and "PYTHON=" in done.stderr
    assert not sandbox.venv.exists()


def test_a_folder_that_is_no_environment_is_left_alone(sandbox):
    sandbox.venv.mkdir()
    (sandbox.venv / "thesis.txt").write_text("mine", encoding="utf-8")
    done = sandbox.run("bash", "launch/test.sh")
    assert done.returncode == 2
    assert "is not a virtual environment; set VENV" in done.stderr
    assert (sandbox.venv / "thesis.txt").read_text(encoding="utf-8") == "mine"


CLOSING = "======= 3 passed, 1 skipped in 1.25s ======="


def ci(sandbox, suite, rest):
    """.ci/run where both parts end with these codes."""
    script = "case $1 in\n"
    for part, line, status in (
        ("--suite", CLOSING, suite),
        ("--rest", CLOSING.replace("3 passed", "2 passed"), rest),
    ):
        script += f"{part}) echo '{line}'; echo 'a late warning' >&2; exit {status} ;;\n"
    (sandbox.root / "launch" / "test_system_python.sh").write_text(f"{script}esac\n", "utf-8")
    (sandbox.root / ".triton").mkdir()  # nothing is to be installed
    return sandbox.run("bash", ".ci/run")


@pytest.mark.parametrize(("suite", "rest", "status"), [(0, 0, 0), (1, 0, 1), (0, 5, 5)])
def test_ci_fails_with_either_part_and_ends_with_pytests_line(sandbox, suite, rest, status):
    done = ci(sandbox, suite, rest)
    assert done.returncode == status
    assert done.stdout.splitlines()[-1] == CLOSING
    assert done.stdout.count("a late warning") == 2


def test_tests_that_another_python_runs_are_there():
    text = (REPOSITORY / "launch" / "test_system_python.sh").read_text(encoding="utf-8")
    tests = re.findall(r"tests/[\w/]+\.py(?:::\w+)?", text)
    assert len(tests) > 5
    for test in tests:
        path, _, name = test.partition("::")
        function = f"def {name.partition('[')[0]}"
        assert function in (REPOSITORY / path).read_text("utf-8"), test


@pytest.mark.parametrize(
    "name", ["align_matrix", "align_cluster", "quickstart", "site", "test", "train_1node"]
)
def test_help_is_the_head_of_a_script_and_installs_nothing(name):
    script = REPOSITORY / "launch" / f"{name}.sh"
    environment = {"PATH": os.environ["PATH"], "PYTHON": "/bin/false", "VENV": "/no/such/folder"}
    done = run_script(script, "--help", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    lines = script.read_text(encoding="utf-8").splitlines()[1:]
    assert done.stdout.splitlines()[0] == lines[0].removeprefix("# ")
    assert "source " not in done.stdout


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
