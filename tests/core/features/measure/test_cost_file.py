"""The file of measured costs: whole, shared by several jobs, and never another file's end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_prefix.errors import UserError
from megatron_prefix.features.measure.cost_file import Measured, read_costs, write_costs
from megatron_prefix.features.measure.cost_fit import Evidence
from megatron_prefix.plan.memory import StageBytes


def test_entries_live_side_by_side(tmp_path: Path) -> None:
    path = str(tmp_path / "new" / "costs.json")
    assert read_costs(path) == {}
    for key, count in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        write_costs(path, key, Measured(replace(Evidence(), count=count)))
    assert {key: one.times.count for key, one in read_costs(path).items()} == {"a": 3.0, "b": 2.0}
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["costs.json"]


def test_bytes_are_kept_beside_times(tmp_path: Path) -> None:
    path = str(tmp_path / "costs.json")
    numbers = {False: {0: StageBytes(1.5)}, True: {0: StageBytes(2.0, 3.0), 1: StageBytes(4.0)}}
    write_costs(path, "a", Measured(num_bytes=numbers))
    assert read_costs(path)["a"].num_bytes == numbers


@pytest.mark.parametrize("row", [[True], [True, 0, "x"], [True, 0, -1.0], [1, 0, *[1.0] * 9], 3])
def test_damaged_bytes_are_refused(tmp_path: Path, row) -> None:
    path = tmp_path / "costs.json"
    write_costs(str(path), "a", Measured())
    values = json.loads(path.read_text(encoding="utf-8"))
    values["measured"]["a"]["bytes"] = [row]
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(UserError, match="damaged"):
        read_costs(str(path))


def test_a_file_of_before_has_no_bytes(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write_costs(str(path), "a", Measured())
    values = json.loads(path.read_text(encoding="utf-8"))
    del values["measured"]["a"]["bytes"]
    path.write_text(json.dumps(values), encoding="utf-8")
    assert read_costs(str(path))["a"].num_bytes == {False: {}, True: {}}


def test_an_empty_file_has_nothing(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(b"\n")
    assert read_costs(str(path)) == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"rollouts", "no file of measured costs"),
        (b"\xff\xfe", "no file of measured costs"),
        (b"[]", "no file of measured costs"),
        (b"[" * 100_000, "no file of measured costs"),
        (b'{"format": "megatron_prefix costs", "version": 9}', "another version than 2"),
        (b'{"format": "megatron_prefix costs", "version": 2}', "damaged"),
        (b'{"format": "megatron_prefix costs", "version": 2, "measured": 1}', "damaged"),
        (b'{"format": "megatron_prefix costs", "version": 2, "measured": {"a": 1}}', "damaged"),
    ],
)
def test_other_files_are_refused_and_kept(tmp_path: Path, text, why) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(text)
    for work in (lambda: read_costs(str(path)), lambda: write_costs(str(path), "a", Measured())):
        with pytest.raises(UserError, match=why) as caught:
            work()
        assert "\n" not in str(caught.value) and "name another file" in str(caught.value)
    assert path.read_bytes() == text


def test_a_file_that_was_cut_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write_costs(str(path), "a", Measured())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="no file of measured costs"):
        read_costs(str(path))


def test_places_that_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_costs(str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be"):
        write_costs(str(tmp_path / "file" / "y" / "z"), "a", Measured())
