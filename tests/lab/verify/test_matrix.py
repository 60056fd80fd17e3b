"""The table of layouts, and the verb around it: what counts and what is not run again; plans
from files and measured timelines, as the commands do them on two ranks."""

import json
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from megatron_prefix.errors import UserError
from megatron_prefix.features.plan_files.table import from_csv
from megatron_prefix.lab import runtime
from megatron_prefix.lab.cli import matrix as verb
from megatron_prefix.lab.cli.main import main
from megatron_prefix.lab.plans import catalogue
from megatron_prefix.lab.runtime.layout import Layout
from megatron_prefix.lab.verify.matrix import LAYOUTS, Row, rows
from tests.harness.command_line import printed
from tests.harness.data import BUNDLED, REPOSITORY

VERDICT = SimpleNamespace(
    passed=True, failures=(), grad_max_rel_diff=3e-15, tolerance=3e-14, grad_error_ratio_max=None,
    baseline="rollout", compared_with="stock schedule",
)  # fmt: skip


def answers(monkeypatch, answer):
    """Lets `answer` stand in for the ranks; returns the names of the rows that ran."""
    ran = []

    def align_row(row, *_, **__):
        ran.append(row.name)
        return answer(row)

    monkeypatch.setattr(verb, "align_row", align_row)
    return ran


def test_the_table_has_every_combination_once():
    names = [row.name for row in rows()]
    num = (12 + 19 + 5 + 4 + 5 + 2) * 4 * 2 + (5 + 4 + 6 + 3 + 3) * 3 * 2
    assert len(names) == len(set(names)) == num
    for layout in "TP2 PP2xVPP2 CP4 DP2 TP2xPP2xCP2".split():
        assert f"dense/{layout}/chunked/full" in names
    for layout in "EP2 EP4 PP2xEP2 TP2xEP2xPP2 TP2xCP2 CP2xEP2 TP2xCP2xEP2xPP2".split():
        assert f"moe/{layout}/flat/none" in names
        assert f"moe/{layout}/packed/full" in names


def test_data_parallelism_fills_a_larger_world():
    row = Row("dense", "TP2xPP2", "flat", "none")
    assert row.layout_in() == row.layout_in(4) == Layout(tp=2, pp=2)
    assert row.layout_in(16) == Layout(tp=2, pp=2, dp=4)
    assert Row("moe", "EP2", "flat", "none").layout_in(8) == Layout(ep=2, dp=8)
    with pytest.raises(UserError, match="multiple of 4 ranks, but the world has 6"):
        row.layout_in(6)


def test_one_line_a_layout(monkeypatch, capsys, tmp_path):
    answers(monkeypatch, lambda row: VERDICT)
    document = tmp_path / "new" / "matrix.md"
    only = ["matrix", "--only", "dense/TP2/*", "dense/PP?/*"]
    assert main([*only, "--markdown", str(document)]) == 0
    told = capsys.readouterr()
    assert "24 rows: 24 aligned" in told.out
    assert told.err.count("aligned") == 24
    lines = document.read_text(encoding="utf-8").splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("| dense")] == [
        "| dense TP2", "| dense PP2", "| dense PP4",
    ]  # fmt: skip
    assert lines[4] == f"| dense TP2{' | 3e-15' * 8} |"


def refuse(row):
    raise UserError(f"{row.layout} is not supported yet\nsecond line")


def fail(row):
    raise runtime.RankError("rank 1 failed:\nTraceback\nZeroDivisionError: division by zero\n")


def differ(row):
    failures = ("gradient of x: 1e-3", "more")
    return SimpleNamespace(**vars(VERDICT) | {"passed": False, "failures": failures})


@pytest.mark.parametrize(("answer", "status", "reason", "codes"), [
    (refuse, "refused", "DP2 is not supported yet", (1, 0)),
    (fail, "failed", "ZeroDivisionError: division by zero", (1, 1)),
    (differ, "different", "gradient of x: 1e-3", (1, 1)),
])  # fmt: skip
def test_what_is_not_aligned_does_not_pass(monkeypatch, capsys, answer, status, reason, codes):
    answers(monkeypatch, answer)
    row = "dense/DP2/flat/none"
    for code, more in zip(codes, ([], ["--allow-refused"]), strict=True):
        assert main(["matrix", "--only", row, "--json", *more]) == code
        told = json.loads(capsys.readouterr().out)
        assert told["counts"] == {status: 1}
        assert told["rows"][0]["row"] == row
        assert told["rows"][0]["reason"] == reason
    assert main(["matrix", "--only", row]) == codes[0]
    told = capsys.readouterr()
    assert f"{status}: {reason}" in told.out
    assert f" s  {row}: {status} ({reason})" in told.err
    assert ("rank 1 failed:" in told.err) == (status == "failed")  # all of it, beside the line


def test_continue_runs_what_is_not_aligned_yet(monkeypatch, capsys, tmp_path):
    record = str(tmp_path / "new" / "rows.jsonl")
    command = ["matrix", "--only", "dense/[DT]P2/flat/*", "--continue", record]
    ran = answers(monkeypatch, lambda row: VERDICT if row.layout == "DP2" else fail(row))
    assert main(command) == 1
    assert len(ran) == 4
    again = answers(monkeypatch, lambda row: VERDICT)
    assert main(command) == 0
    assert again == ["dense/TP2/flat/none", "dense/TP2/flat/full"]
    assert "4 rows: 4 aligned" in capsys.readouterr().out
    for more in (["--dtype", "float32"], ["--deal", "length"]):
        other = answers(monkeypatch, lambda row: VERDICT)
        assert main([*command, *more]) == 0  # results of another kind do not count
        assert len(other) == 4


def test_names_of_layouts_are_true():
    for name, (layout, _) in LAYOUTS.items():
        sizes = dict(part.rstrip("0123456789") and (part[:-1], int(part[-1]))
                     for part in name.replace("+SP", "").split("x"))  # fmt: skip
        for key in ("tp", "pp", "cp", "ep", "vpp"):
            assert getattr(layout, key) == sizes.get(key.upper(), 1), name
        # Experts take the context-parallel ranks first, then as many data-parallel ones as needed.
        assert layout.dp == sizes.get("DP", sizes.get("EP", layout.cp) // layout.cp), name


TWO_STAGES = ["--pp", "2", "--set", "num_layers=2"]


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """Those of a shape of the catalogue."""
    path = str(tmp_path_factory.mktemp("rollouts") / "tree.jsonl")
    folder = str(REPOSITORY / "schedules")
    assert catalogue.main([folder, "--rollouts", "two-level-tree", path]) is None
    return path


@pytest.mark.parametrize(("layout", "name"), [
    ("--pp 4", "two-level-tree-pp4"), ("--pp 2 --vpp 2", "two-level-tree-pp2-vpp2"),
])  # fmt: skip
def test_align_runs_a_plan_of_the_catalogue(rollouts, layout, name):
    """With the options that the README names."""
    options = f"--baseline rollout --min-gain 0 --segment-tokens 32 {layout} --set num_layers=4"
    options += f" --prefix-plan schedules/{name}.csv"
    found = printed("align", "--rollouts", rollouts, *options.split())
    assert found["passed"] and found["executed_tokens"] < found["raw_tokens"]


def test_train_runs_a_plan_and_measures_it(tmp_path):
    plan, trace, picture = (tmp_path / name for name in ("plan.csv", "t/trace.json", "t/trace.svg"))
    lengths = [
        "--groups", "2", "--max-tokens", "128", "--chunk-tokens", "32", "--segment-tokens", "64",
    ]  # fmt: skip
    printed("plan", str(BUNDLED), *lengths, "--pp", "2", "--extra", "1", "--csv", str(plan))
    done = printed(
        "train", str(BUNDLED), *lengths, *TWO_STAGES, "--steps", "1", "--groups-per-step", "2",
        "--prefix-plan", str(plan), "--trace", str(trace), "--trace", str(picture),
        "--output", str(tmp_path / "run"),
    )  # fmt: skip
    assert done["trace"] == [str(trace), str(picture)]
    programs = from_csv(plan.read_text(encoding="utf-8")).programs
    check_measured(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"], programs)
    drawn = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    boxes = [rect for rect in drawn.iter() if rect.tag.endswith("rect") and len(rect)]
    tips = [rect[0].text or "" for rect in boxes if " ms" in (rect[0].text or "")]
    assert len(tips) == sum(map(len, programs))


def check_measured(events, programs):
    """Every action once, in the plan's order, and none before what it needs had been computed."""
    events = [event for event in events if event["ph"] == "X"]
    at = {}
    for rank, program in enumerate(programs):
        mine = [event for event in events if event["tid"] == rank]
        assert [event["name"] for event in mine] == [str(action) for action in program]
        clock = 0.0
        for event in mine:
            assert event["ts"] >= clock and event["dur"] > 0
            clock = event["ts"] + event["dur"]
            at[rank, event["name"]] = event["ts"], clock
    for (rank, name), (start, _) in at.items():
        source = rank - 1 if name[0] == "F" else rank + 1
        if (source, name) in at:
            # Zero is a barrier, which the ranks leave a moment apart: on a busy machine 5 ms.
            assert start >= at[source, name][1] - 2e4, (rank, name)
