"""The folders of the package: which of them import torch, and that none import each other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import data

PACKAGE = data.REPOSITORY / "megatron_prefix"
PURE_ROOMS = ("tree", "plan")
AT_THE_ROOT = {"__init__.py", "__main__.py", "config.py", "errors.py"}


STOCK = r"^megatron\.(.*\.get_forward_backward_func|core\.pipeline_parallel(\.schedules)?)$"


def _imported(source: str) -> Iterator[str]:
    """Dotted names of all modules that are imported when the code runs, in functions too."""
    tree = ast.parse(source)
    hints = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in hints:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _rooms() -> dict[str, set[str]]:
    """Which rooms each room imports; files at the root are none."""
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    used: dict[str, set[str]] = {folder: set() for folder in folders}
    for folder in folders:
        for path in (PACKAGE / folder).rglob("*.py"):
            if path.name == "__main__.py":  # a command, which nothing imports
                continue
            for name in _imported(path.read_text(encoding="utf-8")):
                parts = name.split(".")
                if parts[0] == "megatron_prefix" and len(parts) > 1 and parts[1] in folders:
                    used[folder].add(parts[1])
        used[folder].discard(folder)
    return used


def _circle(used: dict[str, set[str]]) -> list[str]:
    """Rooms that import one another in a circle; empty where there are none."""
    left = dict(used)
    while left:
        free = [room for room, others in left.items() if not others & left.keys()]
        if not free:
            return sorted(left)
        for room in free:
            del left[room]
    return []


@pytest.mark.parametrize("room", PURE_ROOMS)
def test_tree_and_plan_import_neither_torch_nor_megatron(room) -> None:
    for path in sorted((PACKAGE / room).rglob("*.py")):
        heavy = {name.partition(".")[0] for name in _imported(path.read_text(encoding="utf-8"))}
        assert not heavy & {"torch", "megatron"}, path.name


def test_no_two_rooms_import_each_other() -> None:
    assert _circle(_rooms()) == []


def test_the_map_of_the_folders_is_true() -> None:
    """Every folder has its line, and imports only folders above it."""
    text = (data.REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    order = re.findall(r"^\| `(\w+)` \|", text.partition("### Folders")[2], re.M)
    used = _rooms()
    assert sorted(order) == sorted(used)
    for number, folder in enumerate(order):
        assert used[folder] <= set(order[:number]), folder


def _importing(pattern: str) -> list[str]:
    """Files of the package that import a name that matches."""
    return [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if any(re.search(pattern, name) for name in _imported(path.read_text(encoding="utf-8")))
    ]


def test_nothing_imports_a_command() -> None:
    assert _importing(r"^megatron_prefix\b.*\.__main__\b") == []


def test_one_file_asks_megatron_for_its_schedule_and_one_takes_its_place() -> None:
    """Anything else would get the prefix schedule where `auto` has turned it on."""
    assert _importing(STOCK) == ["megatron/stock.py"]
    finders = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "sys.meta_path" in path.read_text(encoding="utf-8")
    ]
    assert finders == ["auto/swap.py"]


def test_a_circle_would_be_found() -> None:
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c", "d"]
    assert _circle({"a": {"b"}, "b": set()}) == []
    source = "def f():\n    import torch.nn\n    from megatron_prefix import run"
    assert list(_imported(source)) == ["torch.nn", "megatron_prefix.run"]


def test_only_a_handful_of_files_is_at_the_root() -> None:
    assert {path.name for path in Path(PACKAGE).glob("*.py")} == AT_THE_ROOT
