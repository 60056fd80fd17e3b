"""Plans from files and measured timelines, as the commands do them on two ranks."""

import json
from xml.etree import ElementTree

import pytest

from megatron_prefix.features.plan_files.table import from_csv
from megatron_prefix.lab.plans import catalogue
from tests.harness.command_line import printed
from tests.harness.data import BUNDLED, REPOSITORY

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
