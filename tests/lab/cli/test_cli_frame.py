"""The command line: help, exit codes, and what goes to which stream; the verb `show`."""

import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from megatron_prefix import __version__
from megatron_prefix.errors import UserError
from megatron_prefix.features.plan_files.table import from_csv, to_csv
from megatron_prefix.lab.cli import bench, bench_memory, inputs, outputs
from megatron_prefix.lab.cli import main as frame
from megatron_prefix.lab.cli.arguments import layout_of
from megatron_prefix.lab.cli.main import VERBS, main, make_parser
from megatron_prefix.lab.models import build, presets
from megatron_prefix.lab.models.config import check_layout
from megatron_prefix.lab.plans.forest import forest_of
from megatron_prefix.lab.runtime import RankError
from tests.harness import data
from tests.harness.command_line import BUNDLED, command, failure, forked, result, row, run
from tests.harness.joint_jobs import crossing_plan
from tests.harness.trees import cells, with_programs


def test_python_m_runs_the_command_line():
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"megatron-prefix {__version__}\n")


@pytest.mark.parametrize("verb", [None, *VERBS])
def test_help_has_examples_which_parse_and_json(capsys, verb):
    code, out, _ = run(capsys, *([verb] if verb else []), "--help")
    assert code == 0
    if verb:
        assert f"  megatron-prefix {verb}" in out and "--json" in out
    else:
        assert all(f"{name} " in out and " ".join(said.split()[:4]) in out
                   for name, (_, said, *_) in VERBS.items())  # fmt: skip
    # The command lines, as a shell would split them.
    told = out.partition("examples:\n")[2].replace("\\\n", " ")
    found = [shlex.split(line) for line in told.splitlines() if line.strip()]
    assert len(found) >= 3
    for words in found:
        start = words.index("megatron-prefix" if words[0] != "torchrun" else "megatron_prefix")
        arguments = words[start + 1 :]
        if arguments == ["VERB", "--help"]:
            continue
        args = make_parser(arguments[0]).parse_args(arguments)
        assert verb in (None, args.verb)
        if getattr(args, "model", None) in presets.PRESETS and hasattr(args, "tp"):
            check_layout(presets.resolve(args.model), layout_of(args, None))


ROLLOUTS = (BUNDLED, "--groups", "1", "--max-tokens", "64")


@pytest.mark.parametrize("arguments", [
    ("align", "--rollouts", *ROLLOUTS, "--pp", "2", "--kernel", "none", "--recompute", "full"),
    ("train", *ROLLOUTS, "--kernel", "none"),
    ("bench", "--shapes", "64:8:2", "--kernel", "none"),
], ids=lambda arguments: arguments[0])  # fmt: skip
def test_a_refused_command_writes_one_line_and_no_warnings(tmp_path, arguments):
    """In a process of its own, after everything has been imported and the model has been built; in
    one case it imports everything itself."""
    output = ("--output", str(tmp_path / "run")) if arguments[0] == "train" else ()
    done = (command if arguments[0] == "align" else forked)(*arguments, *output)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"megatron-prefix {arguments[0]}: attention kernel 'none'")
    assert done.stderr.count("\n") == 1


def test_names_are_printed_in_any_encoding(tmp_path):
    """The C locale without Python's own remedies: ASCII for the terminal and for files."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("LC_")},
        "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0",
    }  # fmt: skip
    path = tmp_path / "wörter.jsonl"
    path.write_text(row(group="grüße"), encoding="utf-8")
    svg = tmp_path / "plan.svg"
    done = command("plan", str(path), "--svg", str(svg), env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert ElementTree.parse(svg)
    done = command("plan", str(tmp_path / "fehlt-ö.jsonl"), env=environment)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_plan_takes_less_than_a_second():
    """In CPU seconds, which other work on the machine does not lengthen."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert command("plan", BUNDLED, "--groups", "1").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def stand_in(monkeypatch, run):
    module = SimpleNamespace(HELP="", EPILOG="", add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(frame, "_module", lambda verb, name: module)


def raising(error):
    def run(args):
        raise error

    return run


@pytest.mark.parametrize(("error", "code", "said"), [
    (UserError("first\nsecond"), 2, "megatron-prefix plan: first\n"),
    (RankError("rank 1 failed:\nits traceback"), 1,
     "megatron-prefix plan: rank 1 failed:\nits traceback\n"),
    (KeyboardInterrupt(), 130, "megatron-prefix plan: interrupted\n"),
], ids=["first line", "failed rank", "interrupted"])  # fmt: skip
def test_errors_have_their_codes_and_lines(capsys, monkeypatch, error, code, said):
    stand_in(monkeypatch, raising(error))
    assert run(capsys, "plan") == (code, "", said)
    stand_in(monkeypatch, lambda args: 1)  # a check that has failed
    assert run(capsys, "plan") == (1, "", "")


def test_bugs_are_not_hidden(capsys, monkeypatch):
    stand_in(monkeypatch, raising(ValueError("a bug")))
    with pytest.raises(ValueError, match="a bug"):
        main(["plan"])


# Files that a verb is asked to write and cannot ---------------------------------------------------


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
    for name in ("plan csv", "plan svg", "show svg", "generate"):
        line = failure(capsys, *WRITERS[name], "/dev/full")
        assert "/dev/full: cannot be written (No space left" in line
    assert Path("/dev/full").is_char_device()


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


STEP = [BUNDLED, *"--pp 2 --segment-tokens 200 --min-gain 0 --share group".split()]


@pytest.fixture
def plan_file(capsys, tmp_path):
    path = tmp_path / "plan.csv"
    run(capsys, "plan", *STEP, "--csv", str(path))
    return path


def test_show_json_agrees_with_plan(capsys, plan_file):
    shown = result(capsys, "show", str(plan_file))
    planned = result(capsys, "plan", *STEP)
    keys = "makespan bubble_fraction peak_live_tokens num_actions segments rollouts raw_tokens"
    for key in f"{keys} executed_tokens max_depth".split():
        assert shown[key] == planned[key], key
    assert (shown["num_ranks"], shown["num_chunks"], shown["trees"]) == (2, 1, 8)
    assert len(shown["bubble_fractions"]) == len(shown["peak_live_tokens_per_rank"]) == 2


def test_show_cuts_the_grid_to_the_terminal(capsys, plan_file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    code, out, err = run(capsys, "show", str(plan_file))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("stage 0  F0  F1")
    assert all(len(line) <= 60 for line in lines)
    program = from_csv(plan_file.read_text(encoding="utf-8")).programs[0]
    shown = [word for word in lines[0].split() if word[0] in "FB"]
    assert shown == [str(action) for action in program[: len(shown)]]
    assert lines[0].endswith(f"... {len(program) - len(shown)} more")
    assert "bubble" in out


def test_show_full_prints_every_action(capsys, plan_file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = run(capsys, "show", str(plan_file), "--full")
    plan = from_csv(plan_file.read_text(encoding="utf-8"))
    for rank, program in enumerate(plan.programs):
        rows = [line.split()[2:] for line in out.splitlines() if line.startswith(f"stage {rank} ")]
        assert [cell for row in rows for cell in row] == [str(action) for action in program]


def test_show_marks_the_bad_cell_of_an_invalid_plan(capsys, plan_file, tmp_path):
    plan = from_csv(plan_file.read_text(encoding="utf-8"))
    programs = cells(plan)
    programs[1].insert(0, programs[1].pop(1))
    plan_file.write_text(to_csv(with_programs(plan, programs)), encoding="utf-8")
    svg = tmp_path / "shown.svg"
    code, out, err = run(capsys, "show", str(plan_file), "--svg", str(svg))
    assert code == 2
    assert err == (
        f"megatron-prefix show: {plan_file}: rank 1, place 0: F1 runs before the forward of its"
        " parent 0\n"
    )
    marked = [line for line in out.splitlines() if ">F1<" in line]
    assert [line[-8:] for line in marked] == ["<-- here"]
    assert not svg.exists()
    assert failure(capsys, "show", str(plan_file), "--json") == err[:-1]


def test_a_reader_that_goes_away_is_met_quietly(plan_file):
    with subprocess.Popen(
        [sys.executable, "-m", "megatron_prefix", "show", str(plan_file), "--full"],
        cwd=data.REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.close()
        err = process.stderr.read()
    assert (process.returncode, err) == (141, b"")


def test_show_has_what_crosses_in_the_grid_and_not_in_times(capsys, tmp_path):
    path, plan = tmp_path / "rank.csv", crossing_plan()
    assert {action.kind for action in plan.programs[0]} == {*"FBSR"}
    path.write_text(to_csv(plan), encoding="utf-8")
    found = result(capsys, "show", str(path))
    assert found["num_actions"] == len(plan.programs[0])
    assert found["executed_tokens"] == forest_of(plan).executed_tokens < found["raw_tokens"]
    assert found["makespan"] == 3 * found["executed_tokens"]
    _, out, _ = run(capsys, "show", str(path), "--full")
    words = [
        word for line in out.splitlines() if line.startswith("stage 0") for word in line.split()
    ]
    assert [word for word in words if ">" in word or "<" in word] == [
        str(action) for action in plan.programs[0] if action.peer >= 0
    ]
    picture = tmp_path / "rank.svg"
    assert run(capsys, "show", str(path), "--svg", str(picture))[0] == 0 and picture.is_file()
