"""The features: the core names none of them, and loads none before a step needs it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from megatron_prefix import features
from tests.core.test_purity import in_fresh_interpreter
from tests.harness import data

PACKAGE = data.REPOSITORY / "megatron_prefix"
APART = ("lab/", "features/")
WORDS = {
    "dsa": r"dsa|DSA|indexer",
    "own_gdn": r"own_gdn|own_delta|OwnGated|linear_attn|hf_forward",
}
"""By feature what only it says: in a name, or in a string that is a value."""
STAYS = {
    "dsa": {"refusals/table.py"},
}
"""Files of the core that name a feature all the same: refusals have one table."""


def _files() -> Iterator[tuple[str, ast.Module]]:
    """The core: what is neither in the lab nor in a feature."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if not name.startswith(APART):
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def _names(tree: ast.Module) -> Iterator[str]:
    """Every name of a file, and every string that is a value."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings:
                yield node.value
        elif isinstance(node, ast.ImportFrom):
            yield f"{node.module}."
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


def _naming(pattern: str) -> set[str]:
    return {file for file, tree in _files() if any(re.search(pattern, n) for n in _names(tree))}


def test_every_folder_of_a_feature_is_in_the_table() -> None:
    folders = {path.parent.name for path in (PACKAGE / "features").glob("*/__init__.py")}
    paths = [kind.path for kind in features.KINDS]
    assert {path.split(".")[2] for path in paths} == folders == WORDS.keys()


@pytest.mark.parametrize("name", WORDS)
def test_nothing_in_the_core_names_a_feature(name) -> None:
    assert _naming(WORDS[name]) == STAYS.get(name, set())


def test_the_core_imports_the_table_of_features_only() -> None:
    assert _naming(r"megatron_prefix\.features\.") == set()


def test_a_name_of_any_kind_is_seen() -> None:
    for code in ("import a.dsa", "from b.dsa import c", "x = 'a dsa b'", "def dsa(): ...",
                 "f(dsa=1)", "x.dsa", "import a as dsa"):  # fmt: skip
        assert any("dsa" in name for name in _names(ast.parse(code))), code
    assert not any("dsa" in name for name in _names(ast.parse('"""dsa"""\nx: int\n"""dsa"""')))


def test_the_package_loads_no_feature() -> None:
    """Nor do its schedule and the numbers of a model, before one needs it."""
    in_fresh_interpreter(
        "import sys, megatron_prefix\n"
        "from megatron_prefix.lab.models.presets import PRESETS\n"
        "from megatron_prefix.layers.model import cost_of\n"
        "for spec in PRESETS.values():\n    cost_of(spec)\n"
        "loaded = [n for n in sys.modules if n.startswith('megatron_prefix.features.')]\n"
        "assert not loaded, loaded\n"
    )


def test_the_schedule_loads_no_feature() -> None:
    in_fresh_interpreter(
        "import sys, megatron_prefix.run.schedule\n"
        "loaded = [n for n in sys.modules if n.startswith('megatron_prefix.features.')]\n"
        "assert not loaded, loaded\n"
        "sys.modules.clear()\n"
    )
