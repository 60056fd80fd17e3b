"""`benchmarks.mutants`: its table fits the code, and its verdicts are those of its tests."""

import json
import shlex
import subprocess
from collections import Counter

import pytest

from benchmarks import mutants
from benchmarks.mutants_table import MUTANTS, Mutant
from tests.harness.data import REPOSITORY


def test_every_line_of_the_table_fits():
    """Who changes such a line of the code changes it here, or takes it out."""
    assert all(number == 1 for number in Counter(one.name for one in MUTANTS).values())
    for mutant in MUTANTS:
        text = (REPOSITORY / mutant.file).read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, f"{mutant.name}: benchmarks/mutants_table.py"
        assert mutant.old != mutant.new and mutant.tests, mutant.name
        for tests in mutant.tests:
            assert (REPOSITORY / shlex.split(tests)[0]).is_file(), mutant.name


MODULE = (
    "def total(values):\n    return sum(values)\n\n\ndef first(values):\n    return values[0]\n"
)
TESTS = """
import pytest

import adding


def test_total():
    assert adding.total([1, 2]) == 3


def test_first():
    assert adding.first([7, 7]) == 7


def test_elsewhere():
    pytest.skip("not here")
"""
TABLE = tuple(
    Mutant(f"sums/{name}", "adding.py", old, new, (f"test_adding.py -k {tests}",), why)
    for name, old, new, tests, why in [
        ("killed", "sum(values)", "sum(values) + 1", "total", ""),
        ("survived", "values[0]", "values[1]", "first", ""),
        ("explained", "values[0]", "values[-1]", "first", "equal values are alike"),
        ("stale", "values[2]", "values[0]", "first", ""),
        ("twice", "values)", "", "first", ""),
        ("not run", "values[0]", "None", "elsewhere", ""),
        ("broken", "def total", "def other", "no_such_test", ""),
    ]
)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a module and its tests, which git has not heard of."""
    root = tmp_path / "repository"
    root.mkdir()
    (root / "adding.py").write_text(MODULE, encoding="utf-8")
    (root / "test_adding.py").write_text(TESTS, encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    monkeypatch.setattr(mutants, "REPOSITORY", root)
    monkeypatch.setattr(mutants, "MUTANTS", TABLE)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer than these tests
    return root


def test_verdicts(repository, capsys, tmp_path):
    """What it finds is written down, and not run again; the original stays as it is."""
    out = tmp_path / "out.jsonl"
    assert mutants.main(["--out", str(out)]) == 1
    rows = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    found = {row["name"]: row["what"] for row in rows}
    names = ("killed", "survived", "stale", "not run", "broken")
    expected = {f"sums/{name}": name for name in names}
    assert found == expected | {"sums/explained": "survived", "sums/twice": "stale"}
    said = capsys.readouterr()
    assert "explained: equal values are alike" in said.out and "1 survivors explained" in said.out
    assert "stale: sums/twice: the text is 3 times in adding.py" in said.err
    assert (repository / "adding.py").read_text(encoding="utf-8") == MODULE
    lines = len(out.read_text(encoding="utf-8").splitlines())
    good = ["--only", "sums/killed", "--only", "sums/explained", "--json", "--out", str(out)]
    assert mutants.main(good) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["what"] for row in rows] == ["killed", "survived"]
    assert len(out.read_text(encoding="utf-8").splitlines()) == lines


def test_every_area_has_ten():
    areas = Counter(one.area for one in MUTANTS)
    assert min(areas[name] for name in ("graphs", "vision", "own-gdn", "dsa", "replay")) >= 10
