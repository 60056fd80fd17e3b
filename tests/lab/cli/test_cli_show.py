"""The command line: the verb `show`."""

import subprocess
import sys

import pytest

from megatron_prefix.features.plan_files.table import from_csv, to_csv
from megatron_prefix.lab.plans.forest import forest_of
from tests.harness import data
from tests.harness.command_line import BUNDLED, failure, result, run
from tests.harness.joint_jobs import crossing_plan
from tests.harness.trees import cells, with_programs

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
