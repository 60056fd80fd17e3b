"""The catalogue of plans: byte by byte what the planner makes, and as its README says."""

import itertools
import re
import shutil
import subprocess
import sys

import pytest

from megatron_prefix.errors import UserError
from megatron_prefix.features.plan_files.plan_file import PlanFile
from megatron_prefix.features.plan_files.segments import check_segments
from megatron_prefix.features.plan_files.table import from_csv, to_csv
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import read_groups
from megatron_prefix.lab.plans import catalogue
from megatron_prefix.lab.plans.forest import trees
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.planner import best_plan
from megatron_prefix.tree import build
from tests.harness.data import REPOSITORY

FOLDER = REPOSITORY / "schedules"
WANTED = dict(catalogue.plans(FOLDER))
ONE_SHAPE = '[[shape]]\nname = "x"\nabout = ""\nsegment_tokens = 1\n'
SHAPES = {shape.name: shape for shape in catalogue.read_catalogue(FOLDER)[0]}


@pytest.mark.parametrize("name", WANTED)
def test_a_file_is_what_the_catalogue_makes(name):
    assert (FOLDER / name).read_text(encoding="utf-8") == WANTED[name]


def test_nothing_else_is_in_the_folder():
    assert {path.name for path in FOLDER.iterdir()} == {*WANTED, "catalogue.toml", "README.md"}
    assert catalogue.differing(FOLDER) == []


def test_the_folder_holds_no_code():
    assert not list(FOLDER.rglob("*.py"))


def test_shapes_and_pipelines_are_those_that_are_promised():
    assert list(SHAPES) == [
        "flat-group", "several-groups", "two-level-tree", "chunked-prefix", "uneven-groups",
        "small-groups",
    ]  # fmt: skip
    pipelines = {(plan.num_ranks, plan.num_chunks) for plan in map(from_csv, WANTED.values())}
    assert pipelines == {(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2)}
    assert len(WANTED) == len(SHAPES) * len(pipelines)


@pytest.mark.parametrize("name", WANTED)
def test_a_plan_is_read_back_and_runs(name):
    plan = PlanFile(str(FOLDER / name)).plan
    check_segments(plan.segments)
    assert to_csv(plan) == WANTED[name]
    assert simulate(plan).num_actions == 2 * len(plan.segments) * plan.num_stages


def test_shapes_show_what_they_are_there_for():
    def segments(name):
        return from_csv(WANTED[f"{name}-pp2.csv"]).segments

    assert [segment.inner for segment in segments("flat-group")] == [True] + [False] * 8
    assert len({*itertools.chain(*trees(segments("several-groups")))}) == 3
    assert any(s.inner and s.scored and s.parents for s in segments("two-level-tree"))
    chunks = [segment for segment in segments("chunked-prefix") if segment.inner]
    assert [chunk.parents for chunk in chunks] == [(), *((index,) for index in range(15))]
    uneven = segments("uneven-groups")
    assert len({segment.padded_length for segment in uneven}) >= 10
    assert any(len(segment.spans) > 1 for segment in uneven)
    prompts, *waves = trees(segments("small-groups"))
    assert prompts == (0, 1, 2, 3, 4, 5) and all(len({*numbers}) > 1 for numbers in waves)


@pytest.mark.parametrize("name", SHAPES)
def test_rollouts_of_a_shape_give_its_plans(tmp_path, name):
    path = tmp_path / "rollouts.jsonl"
    assert catalogue.main([str(FOLDER), "--rollouts", name, str(path)]) is None
    forest = build(*pairs_of_groups(list(read_groups(path))), SHAPES[name].options)
    assert to_csv(best_plan(forest, 2)) == WANTED[f"{name}-pp2.csv"]


def test_the_command_writes_and_compares(tmp_path):
    shutil.copy(FOLDER / "catalogue.toml", tmp_path)
    wrong = catalogue.main([str(tmp_path), "--check"])
    assert wrong is not None and "flat-group-pp1.csv" in wrong
    assert catalogue.main([str(tmp_path)]) is None
    assert {
        path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.csv")
    } == WANTED
    assert catalogue.main([str(tmp_path), "--check"]) is None
    (tmp_path / "more.csv").write_text("", encoding="utf-8")
    file = tmp_path / "uneven-groups-pp8.csv"
    file.write_text(
        file.read_text(encoding="utf-8").replace("rank 0,F0", "rank 0,F1"), encoding="utf-8"
    )
    assert catalogue.main([str(tmp_path), "--check"]) == (
        "not what the catalogue makes: more.csv, uneven-groups-pp8.csv"
    )
    assert catalogue.main([str(FOLDER), "--rollouts", "no", "x"]).startswith("no: no such shape")
    done = subprocess.run(
        [sys.executable, "-m", "megatron_prefix.lab.plans.catalogue", str(tmp_path), "--check"],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "") and "more.csv" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layouts = [[1, 1]]", "KeyError: 'shape'"),
        ("layouts = 3", "TypeError"),
        ("layouts = [[1, 1]", "TOMLDecodeError"),
        (f"layouts = []\n{ONE_SHAPE}groups = [{{ tokens = 1, leafs = [1] }}]", "ValueError: leafs"),
    ],
)
def test_what_is_no_catalogue_is_refused(tmp_path, text, message):
    with pytest.raises(UserError, match="cannot be read"):
        catalogue.read_catalogue(tmp_path)
    (tmp_path / "catalogue.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        catalogue.read_catalogue(tmp_path)


def test_the_readme_tells_the_truth():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([\w-]+)` \|", text, re.M)) == set(SHAPES)
    (csv,) = re.findall(r"```\n(megatron_prefix plan,.*?)```", text, re.S)
    plan = from_csv(csv)
    assert simulate(plan).num_actions == 16
    shape = SHAPES["flat-group"]
    rollouts, groups = pairs_of_groups(shape.groups)
    shorter = build(rollouts[:3], groups[:3], shape.options)
    assert best_plan(shorter, 2) == plan
    for name in re.findall(r"schedules/([\w.-]+\.csv)", text):
        assert name in WANTED
    lengths = SHAPES["two-level-tree"].options
    assert f"--segment-tokens {lengths.segment_tokens} " in text
    assert lengths.chunk_tokens == 0
