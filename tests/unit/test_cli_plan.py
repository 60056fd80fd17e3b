"""The command line: verbs `plan` and `show`, exit codes, and what goes to which stream."""

from __future__ import annotations

import gzip
import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

from megatron_prefix import __version__
from megatron_prefix.cli import main as frame
from megatron_prefix.cli import report
from megatron_prefix.cli.main import VERBS, main
from megatron_prefix.data.pairs import pairs_of
from megatron_prefix.data.rollouts import read_groups
from megatron_prefix.errors import UserError
from megatron_prefix.pipeline.actions import Plan
from megatron_prefix.pipeline.simulator import simulate
from tests.harness import data
from tests.harness.trees import cells, trie_size, with_programs

BUNDLED = str(data.BUNDLED)
EXACT = ["--align", "1", "--min-gain", "0"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line."""
    try:
        code = main(list(arguments))
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def result(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    """What a verb prints with --json, which is all that it prints."""
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def failure(capsys: pytest.CaptureFixture[str], *arguments: str, out: str = "") -> str:
    """The one line on stderr with which a command line fails."""
    code, printed, err = run(capsys, *arguments)
    assert (code, printed) == (2, out)
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err[:-1]


def row(**changes) -> str:
    fields = {
        "group": "g",
        "uid": "0",
        "tokens": [1, 2, 3],
        "prompt_len": 1,
        "loss": [[1, 3]],
        "reward": 1.0,
    }
    return json.dumps({key: v for key, v in {**fields, **changes}.items() if v is not None}) + "\n"


# plan ---------------------------------------------------------------------------------------------


def test_plan_json_has_the_keys_of_the_contract_and_their_values(capsys) -> None:
    found = result(capsys, "plan", BUNDLED, *EXACT)
    groups = list(read_groups(BUNDLED))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    ratios = [rollout.prompt_len / len(rollout) for rollout in rollouts]
    trie = sum(trie_size([pairs_of(r) for r in group.rollouts]) for group in groups)
    assert found["rollouts"] == len(rollouts)
    assert found["groups"] == len(groups)
    assert found["raw_tokens"] == sum(len(rollout) - 1 for rollout in rollouts)
    assert found["executed_tokens"] == trie
    assert found["compression"] == found["raw_tokens"] / trie
    assert found["prefix_ratio_p50"] == pytest.approx(np.percentile(ratios, 50))
    assert found["prefix_ratio_p95"] == pytest.approx(np.percentile(ratios, 95))
    assert 2 < found["predicted_speedup"] < found["compression"]
    assert found["segments"] > found["inner_segments"] > len(groups)
    assert found["max_depth"] > 2
    assert found["num_actions"] == 2 * found["segments"]
    assert found["makespan"] == 3 * trie
    assert found["bubble_fraction"] == 0
    assert 0 < found["peak_live_tokens"] < trie
    assert found["peak_live_bytes"] > found["peak_live_tokens"]


@pytest.mark.parametrize(
    ("name", "p50", "p95", "compression"),
    [("tau_airline", 0.609, 0.902, 1.77), ("rag_musique", 0.814, 0.986, 4.33)],
)
def test_plan_finds_what_was_measured(capsys, name, p50, p95, compression) -> None:
    """The data's README gives whole sets, each file is half of one: the figures are near."""
    found = result(capsys, "plan", str(data.path(name)), *EXACT)
    assert found["prefix_ratio_p50"] == pytest.approx(p50, abs=0.06)
    assert found["prefix_ratio_p95"] == pytest.approx(p95, abs=0.06)
    assert found["compression"] == pytest.approx(compression, rel=0.08)


def test_several_files_make_one_step_and_groups_limits_it(capsys, tmp_path) -> None:
    other = tmp_path / "other.jsonl"
    made = result(capsys, "generate", str(other), "--groups", "3", "--seed", "5")
    whole = result(capsys, "plan", BUNDLED, str(other))
    assert whole["groups"] == 8 + 3
    assert whole["rollouts"] == 53 + made["rollouts"]
    assert result(capsys, "plan", BUNDLED, str(other), "--groups", "2")["groups"] == 2
    assert result(capsys, "plan", str(other), "--groups", "9")["groups"] == 3


def test_options_reach_the_tree(capsys) -> None:
    plain = result(capsys, "plan", BUNDLED, *EXACT)
    for arguments, key, wanted in (
        (["--align", "16"], "align", 16),
        (["--chunk-tokens", "64"], "chunk_tokens", 64),
        (["--tp", "2", "--sequence-parallel", "--cp", "2"], "align", 8),
        (["--tp", "2"], "align", 1),
        (["--cp", "4"], "align", 8),
        (["--pp", "4"], "num_stages", 4),
        (["--pp", "2", "--vpp", "2"], "num_stages", 4),
    ):
        assert result(capsys, "plan", BUNDLED, *arguments)[key] == wanted
    for arguments in (["--min-gain", "500"], ["--align", "64"], ["--loss-in-leaves"]):
        found = result(capsys, "plan", BUNDLED, *EXACT, *arguments)
        assert found["executed_tokens"] > plain["executed_tokens"]
        assert found["raw_tokens"] == plain["raw_tokens"]
    cut = result(capsys, "plan", BUNDLED, *EXACT, "--wave-tokens", "100", "--chunk-tokens", "50")
    assert cut["segments"] > plain["segments"]
    assert cut["executed_tokens"] == plain["executed_tokens"]
    twice = result(capsys, "plan", BUNDLED, *EXACT, "--share", "batch")
    assert twice["executed_tokens"] <= plain["executed_tokens"]
    ahead = [result(capsys, "plan", BUNDLED, "--pp", "4", "--extra", e)["makespan"] for e in "12"]
    assert ahead[0] != ahead[1]


def test_auto_chunks_wait_no_more_than_whole_prefixes(capsys, tmp_path) -> None:
    path = str(tmp_path / "long.jsonl.gz")
    result(capsys, "generate", path, "--prompt-tokens", "4096", "--groups", "4")
    options = ("plan", path, "--pp", "4", "--wave-tokens", "512")
    whole, auto = (result(capsys, *options, "--chunk-tokens", text) for text in ("0", "auto"))
    assert 0 < auto["chunk_tokens"] < 4096
    assert auto["makespan"] < 0.8 * whole["makespan"]
    fixed = result(capsys, *options, "--chunk-tokens", str(auto["chunk_tokens"]))
    assert fixed == auto


def test_max_tokens_shortens_and_counts_what_it_drops(capsys) -> None:
    found = result(capsys, "plan", BUNDLED, "--max-tokens", "200")
    assert found["raw_tokens"] <= 199 * found["rollouts"]
    assert found["rollouts"] + found["dropped_rollouts"] == 53


def late_loss(path: Path) -> str:
    """Two rollouts that share nothing; the second is trained from its ninth token on only."""
    first, second = list(range(10)), list(range(20, 30))
    path.write_text(row(tokens=first) + row(tokens=second, uid="1", prompt_len=8, loss=[[8, 10]]))
    return str(path)


def test_dropped_rollouts_are_counted(capsys, tmp_path) -> None:
    path = late_loss(tmp_path / "late.jsonl")
    found = result(capsys, "plan", path, "--max-tokens", "5")
    assert (found["rollouts"], found["dropped_rollouts"], found["raw_tokens"]) == (1, 1, 4)
    assert "dropped" in run(capsys, "plan", path, "--max-tokens", "5")[1]
    assert "dropped" not in run(capsys, "plan", path)[1]


def test_nothing_left_is_bad_input(capsys, tmp_path) -> None:
    path = tmp_path / "late.jsonl"
    path.write_text(row(tokens=list(range(10)), prompt_len=10, loss=[]))
    line = failure(capsys, "plan", str(path), "--max-tokens", "5")
    assert line.endswith(f"--max-tokens 5: no trained token is left in {path}; give more")


def test_the_model_decides_the_speedup_only(capsys) -> None:
    found = [
        result(capsys, "plan", BUNDLED, "--model", name)
        for name in ("llama3-8b", "qwen3-30b-a3b", "tiny-llama")
    ]
    assert len({one["predicted_speedup"] for one in found}) == 3
    assert len({one["executed_tokens"] for one in found}) == 1


def test_people_get_a_table(capsys) -> None:
    code, out, err = run(capsys, "plan", BUNDLED, "--pp", "2", "--chunk-tokens", "100")
    assert (code, err) == (0, "")
    for text in (
        "agents.jsonl.gz: 8 groups, 2 stages",
        "53 in 8 groups",
        "18,628",
        "chunks of 100",
    ):
        assert text in out
    assert "\x1b" not in out


def test_csv_and_svg_are_what_was_planned(capsys, tmp_path) -> None:
    csv, svg = tmp_path / "plan.csv", tmp_path / "plan.svg"
    arguments = ["plan", BUNDLED, "--pp", "3", "--csv", str(csv), "--svg", str(svg)]
    found = result(capsys, *arguments)
    plan = Plan.from_csv(csv.read_text())
    assert simulate(plan).makespan == found["makespan"]
    assert len(plan.segments) == found["segments"]
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert "agents.jsonl.gz: 8 groups, 3 stages" in svg.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.csv", "plan.svg"]
    code, out, err = run(capsys, "plan", BUNDLED, "--pp", "3", "--csv", "-")
    assert (code, out) == (0, csv.read_text())
    assert "compression" in err


# Bad input and bad usage --------------------------------------------------------------------------


BAD_FILES = {
    "empty": (b"", ":1: row: the file is empty"),
    "no JSON": (b"{", ":1: row: not JSON"),
    "missing field": (row(tokens=None).encode(), ":1: tokens: missing"),
    "negative token": (row(tokens=[1, -2, 3]).encode(), ":1: tokens: token 1 is negative"),
    "loss outside": (row(loss=[[1, 9]]).encode(), ":1: loss: span outside the row"),
    "loss over the prompt": (row(loss=[[0, 2]]).encode(), ":1: loss: span over the prompt"),
    "lcp": (row(lcp=4).encode(), ":1: lcp: outside"),
    "NaN reward": (row(reward=float("nan")).encode(), ":1: reward: not finite"),
    "prompt_len 0": (row(prompt_len=0, loss=[]).encode(), ":1: prompt_len: outside"),
    "mixed groups": (
        (row() + row(group="h") + row(uid="1")).encode(),
        ":3: group: comes back after other rows",
    ),
    "truncated gzip": (gzip.compress(row().encode())[:-9], ": gzip: truncated or corrupt"),
}


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_rollouts_fail_with_one_line_and_write_nothing(capsys, tmp_path, content, message):
    path, csv = tmp_path / "bad.jsonl", tmp_path / "plan.csv"
    path.write_bytes(content)
    csv.write_text("before")
    for more in ([], ["--json"], ["--csv", str(csv), "--svg", str(tmp_path / "plan.svg")]):
        line = failure(capsys, "plan", str(path), *more)
        assert line.startswith(f"megatron-prefix plan: {path}:")
        assert message in line
    assert csv.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl", "plan.csv"]


def test_groups_of_one_and_copies_are_valid(capsys, tmp_path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(row() + row(group="h") + row(group="h", uid="1"))
    found = result(capsys, "plan", str(path))
    assert (found["groups"], found["raw_tokens"], found["executed_tokens"]) == (2, 6, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "megatron-prefix: the following arguments are required: VERB"),
        (["plam", "x"], "megatron-prefix: argument VERB: invalid choice: 'plam'"),
        (["plan"], "megatron-prefix plan: the following arguments are required: ROLLOUTS"),
        (["plan", "x", "--pp", "0"], "argument --pp: '0' is no whole number from 1"),
        (["plan", "x", "--pp", "two"], "argument --pp: 'two' is no whole number from 1"),
        (["plan", "x", "--groups", "-1"], "argument --groups: "),
        (["plan", "x", "--max-tokens", "1"], "argument --max-tokens: '1' is no whole number"),
        (["plan", "x", "--chunk-tokens", "some"], "'some' is neither 'auto' nor a whole number"),
        (["plan", "x", "--chunk-tokens", "-5"], "argument --chunk-tokens: "),
        (["plan", "x", "--share", "all"], "argument --share: invalid choice: 'all'"),
        (["plan", "x", "--chunk", "5"], "unrecognized arguments: --chunk 5"),
        (["plan", "/no/such/file"], "megatron-prefix plan: /no/such/file: file: cannot be read"),
        (["plan", BUNDLED, "--vpp", "2"], "--vpp 2 needs --pp of at least 2"),
        (["plan", BUNDLED, "--sequence-parallel"], "--sequence-parallel needs --tp"),
        (["plan", BUNDLED, "--dp", "2"], "--dp 2 (and --ep 1): a plan is of one data-parallel"),
        (["plan", BUNDLED, "--ep", "2"], "--dp 2 (and --ep 2)"),
        (["plan", BUNDLED, "--model", "gpt-9"], "model 'gpt-9' is neither a preset"),
        (["plan", BUNDLED, "--csv", "/no/such/plan.csv"], "/no/such/plan.csv: cannot be written"),
        (["plan", BUNDLED, "--svg", "/no/such/plan.svg"], "/no/such/plan.svg: cannot be written"),
        (["plan", BUNDLED, "--csv", "-", "--json"], "--csv - and --json both write to stdout"),
        (["show", "/no/such/plan.csv"], "megatron-prefix show: /no/such/plan.csv: cannot be read"),
        (["show", BUNDLED], "not a plan: it is no text in UTF-8"),
        (["show", __file__], "not a plan"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(capsys, arguments, message) -> None:
    line = failure(capsys, *arguments)
    assert line.startswith("megatron-prefix")
    assert message in line


def test_an_unwritable_svg_leaves_no_csv_behind_half_written(capsys, tmp_path) -> None:
    csv = tmp_path / "plan.csv"
    failure(capsys, "plan", BUNDLED, "--csv", str(csv), "--svg", "/no/such/plan.svg")
    assert not csv.exists() or Plan.from_csv(csv.read_text()).num_ranks == 1
    (tmp_path / "folder").mkdir()
    line = failure(capsys, "plan", BUNDLED, "--csv", str(tmp_path / "folder"))
    assert "cannot be written" in line
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]


# show ---------------------------------------------------------------------------------------------


@pytest.fixture
def plan_file(capsys, tmp_path) -> Path:
    path = tmp_path / "plan.csv"
    run(capsys, "plan", BUNDLED, "--pp", "2", "--csv", str(path))
    return path


def edited(path: Path, rank: int, edit) -> None:
    """Rewrites a plan file with one rank's cells changed."""
    plan = Plan.from_csv(path.read_text())
    programs = cells(plan)
    edit(programs[rank])
    path.write_text(with_programs(plan, programs).to_csv())


def test_show_json_agrees_with_plan(capsys, plan_file) -> None:
    shown = result(capsys, "show", str(plan_file))
    planned = result(capsys, "plan", BUNDLED, "--pp", "2")
    for key in (
        "makespan",
        "bubble_fraction",
        "peak_live_tokens",
        "num_actions",
        "segments",
        "rollouts",
        "raw_tokens",
        "executed_tokens",
        "max_depth",
    ):
        assert shown[key] == planned[key], key
    assert (shown["num_ranks"], shown["num_chunks"], shown["trees"]) == (2, 1, 8)
    assert len(shown["bubble_fractions"]) == len(shown["peak_live_tokens_per_rank"]) == 2


def test_show_cuts_the_grid_to_the_terminal(capsys, plan_file, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    code, out, err = run(capsys, "show", str(plan_file))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("stage 0  F0  F1")
    assert all(len(line) <= 60 for line in lines)
    program = Plan.from_csv(plan_file.read_text()).programs[0]
    shown = [word for word in lines[0].split() if word[0] in "FB"]
    assert shown == [str(action) for action in program[: len(shown)]]
    assert lines[0].endswith(f"... {len(program) - len(shown)} more")
    assert "bubble" in out


def test_show_full_prints_every_action(capsys, plan_file, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = run(capsys, "show", str(plan_file), "--full")
    plan = Plan.from_csv(plan_file.read_text())
    for rank, program in enumerate(plan.programs):
        rows = [line.split()[2:] for line in out.splitlines() if line.startswith(f"stage {rank} ")]
        assert [cell for row in rows for cell in row] == [str(action) for action in program]


def test_show_draws(capsys, plan_file, tmp_path) -> None:
    svg = tmp_path / "shown.svg"
    assert run(capsys, "show", str(plan_file), "--svg", str(svg))[0] == 0
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert "plan.csv" in svg.read_text()


def test_show_marks_the_bad_cell_of_an_invalid_plan(capsys, plan_file, tmp_path) -> None:
    edited(plan_file, 1, lambda cells: cells.insert(0, cells.pop(1)))
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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("\n1,0,0,", "\n1,-1,0,", "segment 1: a row starts at"),
        ("rank 0,F0", "rank 0,X0", "'X0' is not an action"),
        ("plan,1,2,1", "plan,1,3,1", "expected 'rank 0', found"),
    ],
)
def test_show_refuses_broken_files(capsys, plan_file, old, new, message) -> None:
    text = plan_file.read_text()
    assert old in text
    plan_file.write_text(text.replace(old, new, 1))
    assert message in failure(capsys, "show", str(plan_file))


# The frame ----------------------------------------------------------------------------------------


def command(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_prefix", *arguments],
        cwd=data.REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def test_python_m_runs_the_command_line() -> None:
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"megatron-prefix {__version__}\n")
    done = command("plan", "/no/such/file")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_help_lists_every_verb(capsys) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for verb, (_, line) in VERBS.items():
        assert verb in out
        assert " ".join(line.split()[:4]) in out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_examples_and_json(capsys, verb) -> None:
    code, out, _ = run(capsys, verb, "--help")
    assert code == 0
    assert "examples:" in out
    assert f"  megatron-prefix {verb}" in out
    assert "--json" in out


def test_plan_takes_less_than_a_second() -> None:
    """In CPU seconds, which other work on the machine does not lengthen."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert command("plan", BUNDLED, "--groups", "1").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_progress_goes_to_stderr_and_json_to_stdout(capsys) -> None:
    code, out, err = run(capsys, "plan", BUNDLED, "--json", "--progress")
    assert code == 0
    assert json.loads(out)["rollouts"] == 53
    assert err == "rollouts read: 53, 0 s\n"


def test_progress_lines_come_now_and_then(capsys, monkeypatch) -> None:
    monkeypatch.setattr(report, "_LINE_EVERY", 0.0)
    args = SimpleNamespace(progress=True)
    assert list(report.watched(args, "abc", "letters", total=3)) == ["a", "b", "c"]
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"letters: {n} of 3, 0 s" for n in (1, 2, 3, 3)]


def test_a_terminal_gets_a_bar(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with report.progress(SimpleNamespace(progress=False), "letters", 3) as advance:
        advance(3)
    assert capsys.readouterr().out == ""


def test_json_has_no_nan(capsys) -> None:
    report.print_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": (1, None)}})
    assert json.loads(capsys.readouterr().out) == {
        "a": None,
        "b": [None, 1.5],
        "c": {"d": [1, None]},
    }


def stand_in(monkeypatch, run) -> None:
    """Makes `plan` a verb that does what `run` does."""
    module = SimpleNamespace(HELP="", EPILOG="", add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(frame, "_module", lambda verb, name: module)


def raising(error: BaseException):
    def run(args) -> int:
        raise error

    return run


def test_a_failed_check_is_exit_code_1(capsys, monkeypatch) -> None:
    stand_in(monkeypatch, lambda args: 1)
    assert run(capsys, "plan") == (1, "", "")


def test_only_the_first_line_of_a_message_is_printed(capsys, monkeypatch) -> None:
    stand_in(monkeypatch, raising(UserError("first\nsecond")))
    assert failure(capsys, "plan") == "megatron-prefix plan: first"


def test_ctrl_c_is_exit_code_130(capsys, monkeypatch) -> None:
    stand_in(monkeypatch, raising(KeyboardInterrupt()))
    assert run(capsys, "plan") == (130, "", "megatron-prefix plan: interrupted\n")


def test_bugs_are_not_hidden(capsys, monkeypatch) -> None:
    stand_in(monkeypatch, raising(ValueError("a bug")))
    with pytest.raises(ValueError, match="a bug"):
        main(["plan"])


def test_a_verb_without_its_module_is_named(capsys, monkeypatch) -> None:
    monkeypatch.setitem(VERBS, "later", ("no_such_module", "comes later"))
    assert failure(capsys, "later").startswith(
        "megatron-prefix later: later is not in this release"
    )


def test_a_reader_that_goes_away_is_met_quietly(plan_file) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "megatron_prefix", "show", str(plan_file), "--full"],
        cwd=data.REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
    assert (process.returncode, err) == (141, b"")


def test_generate_and_import_report_what_they_wrote(capsys, tmp_path) -> None:
    path, other = str(tmp_path / "a.jsonl.gz"), str(tmp_path / "b.jsonl")
    made = result(capsys, "generate", path, "--groups", "2", "--rollouts", "3")
    assert made == {"path": path, "groups": 2, "rollouts": 6, "tokens": 6 * 1280}
    (tmp_path / "ids.jsonl").write_text(
        json.dumps({"prompt_ids": [1, 2], "response_ids": [3, 4], "reward": 1.0}) + "\n"
    )
    made = result(capsys, "import", "tokens", str(tmp_path / "ids.jsonl"), other)
    assert (made["groups"], made["rollouts"], made["tokens"]) == (1, 1, 4)
    code, out, _ = run(capsys, "generate", path, "--groups", "1")
    assert code == 0
    assert "rollout file" in out
