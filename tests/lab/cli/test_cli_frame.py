"""The command line: help, exit codes, and what goes to which stream."""

import json
import logging
import os
import resource
import shlex
import sys
import time
import warnings
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from megatron_prefix import __version__
from megatron_prefix.errors import UserError
from megatron_prefix.lab.cli import main as frame
from megatron_prefix.lab.cli import progress, report
from megatron_prefix.lab.cli.arguments import layout_of
from megatron_prefix.lab.cli.main import VERBS, main, make_parser
from megatron_prefix.lab.models import presets
from megatron_prefix.lab.models.config import check_layout
from megatron_prefix.lab.runtime import RankError
from megatron_prefix.layers.blocks import kernels
from tests.harness.command_line import BUNDLED, command, failure, forked, result, row, run


def test_python_m_runs_the_command_line():
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"megatron-prefix {__version__}\n")
    done = command("plan", "/no/such/file")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_examples_and_json(capsys, verb):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and verb in out and " ".join(VERBS[verb][1].split()[:4]) in out
    code, out, _ = run(capsys, verb, "--help")
    assert code == 0
    assert "examples:" in out
    assert f"  megatron-prefix {verb}" in out
    assert "--json" in out


@pytest.mark.parametrize("verb", ["align", "bench", "replay", "train"])
def test_help_names_every_attention_kernel(capsys, verb):
    _, out, _ = run(capsys, verb, "--help")
    told = " ".join(out.partition("  --kernel NAME")[2].split()).partition(" (A for")[0]
    assert told == f"attention kernel: {', '.join(kernels.KERNELS)}, A+B"


@pytest.mark.parametrize(
    ("verb", "told"),
    [
        ("plan", "several make one step"),
        ("align", "several make one step"),
        ("train", "steps take groups of several one file after another"),
        ("replay", "steps take groups of several in turn"),
    ],
)
def test_help_says_what_becomes_of_several_files(capsys, verb, told):
    _, out, _ = run(capsys, verb, "--help")
    assert f"(JSON lines, .gz or plain); {told} --" in " ".join(out.split())


def examples(text):
    """The command lines of a help text, as a shell would split them."""
    told = text.partition("examples:\n")[2].replace("\\\n", " ")
    return [shlex.split(line) for line in told.splitlines() if line.strip()]


@pytest.mark.parametrize("verb", [None, *VERBS])
def test_every_example_of_a_help_text_parses(capsys, verb):
    _, out, _ = run(capsys, *([verb] if verb else []), "--help")
    found = examples(out)
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


@pytest.mark.parametrize(
    "arguments",
    [
        ("align", "--rollouts", *ROLLOUTS, "--pp", "2", "--kernel", "none", "--recompute", "full"),
        ("train", *ROLLOUTS, "--kernel", "none"),
        ("bench", "--shapes", "64:8:2", "--kernel", "none"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_refused_command_writes_one_line_and_no_warnings(tmp_path, arguments):
    """In a process of its own, after everything has been imported and the model has been built; in
    one case it imports everything itself."""
    output = ("--output", str(tmp_path / "run")) if arguments[0] == "train" else ()
    done = (command if arguments[0] == "align" else forked)(*arguments, *output)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"megatron-prefix {arguments[0]}: attention kernel 'none'")
    assert done.stderr.count("\n") == 1


def test_other_warnings_are_shown_on_demand(capsys, monkeypatch):
    def warn(args):
        warnings.warn("apex is not installed", stacklevel=1)
        logging.getLogger("megatron.core").warning("falling back")
        logging.getLogger("megatron_prefix.run").warning("of ours")
        return 0

    handler = logging.lastResort
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's
    stand_in(monkeypatch, warn)
    assert run(capsys, "plan") == (0, "", "of ours\n")
    with pytest.warns(UserWarning, match="apex is not installed"):
        assert run(capsys, "plan", "--verbose") == (0, "", "falling back\nof ours\n")
    assert handler is logging.lastResort and not handler.filters
    assert "PYTHONWARNINGS" not in os.environ


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


def test_progress_goes_to_stderr_and_json_to_stdout(capsys):
    code, out, err = run(capsys, "plan", BUNDLED, "--json", "--progress")
    assert code == 0
    assert json.loads(out)["rollouts"] == 53
    assert err == "rollouts read: 53, 0 s\n"


def test_progress_lines_come_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    args = SimpleNamespace(progress=True)
    assert list(progress.watched(args, "abc", "letters", total=3)) == ["a", "b", "c"]
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"letters: {n} of 3, 0 s" for n in (1, 2, 3)]


@pytest.mark.parametrize(("rank", "said"), [(0, ["draws aligned: 2 of 2, 0 s"]), (1, [])])
def test_the_first_rank_shows_what_is_aligned(capsys, monkeypatch, rank, said):
    import torch

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    with progress.draws_aligned(SimpleNamespace(progress=True), "float64", times=2) as advance:
        advance(2)
    assert capsys.readouterr().err.splitlines() == said


@pytest.mark.parametrize("given", [{}, {"json": True}])
def test_a_long_alignment_says_what_it_does(capsys, monkeypatch, given):
    """Machines that read the result are told nothing unless they ask."""
    monkeypatch.setattr(progress, "ALIVE_EVERY", 0.02)
    args = SimpleNamespace(**{"json": False, "progress": False, **given})
    with progress.draws_aligned(args, "float64") as advance:
        advance(0, "draw 1, step of the stock schedule")
        time.sleep(0.2)
        advance(1)
    lines = capsys.readouterr().err.splitlines()
    said = "0 s, draws aligned: 0 of 1; draw 1, step of the stock schedule" in lines
    assert said == (args.progress or not args.json)
    assert bool(lines) == said


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.progress(SimpleNamespace(progress=False), "letters", 3) as advance:
        advance(3)
    assert capsys.readouterr().out == ""


def test_json_has_no_nan(capsys):
    report.print_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": (1, None)}})
    assert json.loads(capsys.readouterr().out) == {
        "a": None, "b": [None, 1.5], "c": {"d": [1, None]},
    }  # fmt: skip


def stand_in(monkeypatch, run):
    """Makes `plan` a verb that does what `run` does."""
    module = SimpleNamespace(HELP="", EPILOG="", add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(frame, "_module", lambda verb, name: module)


def raising(error):
    def run(args):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("first\nsecond"), 2, "megatron-prefix plan: first\n"),
        (
            RankError("rank 1 failed:\nits traceback"),
            1,
            "megatron-prefix plan: rank 1 failed:\nits traceback\n",
        ),
        (KeyboardInterrupt(), 130, "megatron-prefix plan: interrupted\n"),
    ],
    ids=["first line", "failed rank", "interrupted"],
)
def test_errors_have_their_codes_and_lines(capsys, monkeypatch, error, code, said):
    stand_in(monkeypatch, raising(error))
    assert run(capsys, "plan") == (code, "", said)
    stand_in(monkeypatch, lambda args: 1)  # a check that has failed
    assert run(capsys, "plan") == (1, "", "")


def test_bugs_are_not_hidden(capsys, monkeypatch):
    stand_in(monkeypatch, raising(ValueError("a bug")))
    with pytest.raises(ValueError, match="a bug"):
        main(["plan"])


def test_a_verb_without_its_module_is_named(capsys, monkeypatch):
    monkeypatch.setitem(VERBS, "later", ("no_such_module", "comes later"))
    assert failure(capsys, "later").startswith(
        "megatron-prefix later: later is not in this release"
    )


def test_generate_and_import_report_what_they_wrote(capsys, tmp_path):
    path, other = str(tmp_path / "a.jsonl.gz"), str(tmp_path / "b.jsonl")
    made = result(capsys, "generate", path, "--groups", "2", "--rollouts", "3")
    assert made == {"path": path, "groups": 2, "rollouts": 6, "tokens": 6 * 1280}
    (tmp_path / "ids.jsonl").write_text(
        json.dumps({"prompt_ids": [1, 2], "response_ids": [3, 4], "reward": 1.0}) + "\n",
        encoding="utf-8",
    )
    made = result(capsys, "import", "tokens", str(tmp_path / "ids.jsonl"), other)
    assert (made["groups"], made["rollouts"], made["tokens"]) == (1, 1, 4)
    assert failure(capsys, "generate", path, "--groups", "1").endswith(
        f"{path}: already exists; add --overwrite to replace it, or name another"
    )
    code, out, _ = run(capsys, "generate", path, "--groups", "1", "--overwrite")
    assert code == 0
    assert "rollout file" in out
