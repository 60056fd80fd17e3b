"""The command line: help, exit codes, and what goes to which stream."""

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
from megatron_prefix.lab.cli import bench, bench_memory, inputs, outputs
from megatron_prefix.lab.cli import main as frame
from megatron_prefix.lab.cli.arguments import layout_of
from megatron_prefix.lab.cli.main import VERBS, main, make_parser
from megatron_prefix.lab.models import build, presets
from megatron_prefix.lab.models.config import check_layout
from megatron_prefix.lab.runtime import RankError
from tests.harness import data
from tests.harness.command_line import BUNDLED, command, failure, forked, row, run


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
