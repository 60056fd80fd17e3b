"""The catalogue of plans: byte by byte what the planner makes, and as its README says."""

import shutil

import pytest

from megatron_prefix.features.plan_files.table import to_csv
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import read_groups
from megatron_prefix.lab.plans import catalogue
from megatron_prefix.plan.planner import best_plan
from megatron_prefix.tree import build
from tests.harness.data import REPOSITORY

FOLDER = REPOSITORY / "schedules"
WANTED = dict(catalogue.plans(FOLDER))
SHAPES = {shape.name: shape for shape in catalogue.read_catalogue(FOLDER)[0]}


@pytest.mark.parametrize("name", SHAPES)
def test_rollouts_of_a_shape_give_its_plans(tmp_path, name):
    path = tmp_path / "rollouts.jsonl"
    assert catalogue.main([str(FOLDER), "--rollouts", name, str(path)]) is None
    forest = build(*pairs_of_groups(list(read_groups(path))), SHAPES[name].options)
    assert to_csv(best_plan(forest, 2)) == WANTED[f"{name}-pp2.csv"]


def test_files_are_what_the_command_writes(tmp_path):
    assert catalogue.main([str(FOLDER), "--check"]) is None
    shutil.copy(FOLDER / "catalogue.toml", tmp_path)
    wrong = catalogue.main([str(tmp_path), "--check"])
    assert wrong is not None and "flat-group-pp1.csv" in wrong
    assert catalogue.main([str(tmp_path)]) is None
    found = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.csv")}
    assert found == WANTED
    assert catalogue.main([str(tmp_path), "--check"]) is None
    (tmp_path / "more.csv").write_text("", encoding="utf-8")
    file = tmp_path / "uneven-groups-pp8.csv"
    file.write_text(WANTED[file.name].replace("rank 0,F0", "rank 0,F1"), encoding="utf-8")
    assert catalogue.main([str(tmp_path), "--check"]) == (
        "not what the catalogue makes: more.csv, uneven-groups-pp8.csv"
    )
    assert catalogue.main([str(FOLDER), "--rollouts", "no", "x"]).startswith("no: no such shape")
