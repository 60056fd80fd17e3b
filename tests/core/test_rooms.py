"""The folders of the package: two floors, which import torch, and that none import each other.

Every import counts: at the top of a file, in a function, under TYPE_CHECKING. What the core says of
the lab in a string counts as well: so entry points and lists of classes name modules.
"""

import ast
import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import data

PACKAGE = data.REPOSITORY / "megatron_prefix"
PURE_ROOMS = ("tree", "plan")
AT_THE_ROOT = {"__init__.py", "__main__.py", "config.py", "errors.py", "parts.py"}
LAB = "lab"
TABLE = "megatron_prefix.features"
"""The table of features, which names modules in strings: any file may import it. What lies below it
is a room of the core."""
COMMANDS = {"__main__.py", "run/__main__.py"}
"""Of the core: they start the lab's command line, and nothing imports them."""
RUN = PACKAGE / "run"
KNOWN = {"agreement", "calls", "costs", "rank", "request"}
"""Files of run/ that its rooms import; they import no others of run/ themselves."""
STOCK = r"^megatron\.(.*\.get_forward_backward_func|core\.pipeline_parallel(\.schedules)?)$"
NAMED = re.compile(r"\bmegatron_prefix(?:\.\w+)+")


@functools.cache
def _imported(source):
    """Dotted names of all modules that are imported, wherever and whenever."""
    return [*_imports(source)]


def _imports(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _named(source):
    """Dotted names of the package in strings that are values: docstrings may name anything."""
    tree = ast.parse(source)
    texts = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
    }  # docstrings, of attributes too
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield from NAMED.findall(node.value)


def _sources(folder):
    """Files below a folder, by their path in the package, and what is in them."""
    for path in sorted(folder.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), path.read_text(encoding="utf-8")


def _rooms(floor):
    """Which rooms of a floor each of its rooms imports; files beside the rooms are none."""
    prefix = ".".join(("megatron_prefix", *floor.relative_to(PACKAGE).parts, ""))
    folders = {path.parent.name for path in floor.glob("*/__init__.py")} - {LAB}
    used = {folder: set() for folder in folders}
    for folder in folders:
        for path, source in _sources(floor / folder):
            if path in COMMANDS:
                continue
            for name in _imported(source):
                room = name.removeprefix(prefix).partition(".")[0]
                if name == TABLE:
                    continue
                if name.startswith(prefix) and room in folders:
                    used[folder].add(room)
        used[folder].discard(folder)
    return used


@pytest.mark.parametrize("room", PURE_ROOMS)
def test_tree_and_plan_import_neither_torch_nor_megatron(room):
    for path, source in _sources(PACKAGE / room):
        heavy = {name.partition(".")[0] for name in _imported(source)}
        assert not heavy & {"torch", "megatron"}, path


def test_the_core_does_not_know_the_lab():
    """Neither by an import of any kind nor by a name in a string."""
    for path, source in _sources(PACKAGE):
        if path in COMMANDS or path.startswith(f"{LAB}/"):
            continue
        names = (*_imported(source), *_named(source))
        assert [name for name in names if name.startswith("megatron_prefix.lab")] == [], path


@pytest.mark.parametrize(("floor", "title"), [
    (PACKAGE, "The core"), (PACKAGE / LAB, "The lab"), (RUN, "A step"),
], ids=["core", "lab", "run"])  # fmt: skip
def test_the_map_of_the_folders_is_true(floor, title):
    """Every folder has its line, and imports only folders above it: no two import each other."""
    text = (data.REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition(f"#### {title}")[2].partition("###")[0]
    order = re.findall(r"^\| `(\w+)` \|", table, re.M)
    used = _rooms(floor)
    assert sorted(order) == sorted(used)
    for number, folder in enumerate(order):
        assert used[folder] <= set(order[:number]), folder


def test_rooms_of_a_step_know_two_files_beside_them():
    """The other files of run/ are the order of a step."""
    prefix, rooms = "megatron_prefix.run.", _rooms(RUN)
    for path, source in _sources(RUN):
        first = Path(path).with_suffix("").parts[1]
        named = [name for name in _imported(source) if name.startswith(prefix)]
        used = {name.removeprefix(prefix).partition(".")[0] for name in named}
        if first in rooms:
            assert used <= KNOWN | rooms.keys(), path
        elif first in KNOWN:
            assert used <= KNOWN, path


def _importing(pattern):
    """Files of the package that import a name that matches."""
    return [
        path
        for path, source in _sources(PACKAGE)
        if any(re.search(pattern, name) for name in _imported(source))
    ]


def test_nothing_imports_a_command():
    assert _importing(r"^megatron_prefix\b.*\.__main__\b") == []


def test_one_file_asks_for_megatrons_schedule_one_replaces_it():
    """Anything else would get the prefix schedule where `auto` has turned it on."""
    assert _importing(STOCK) == ["megatron/stock.py"]
    finders = [path for path, source in _sources(PACKAGE) if "sys.meta_path" in source]
    assert finders == ["auto/after_import.py"]


def test_only_a_handful_of_files_is_at_the_root():
    assert {path.name for path in Path(PACKAGE).glob("*.py")} == AT_THE_ROOT


_WITHOUT_MARK = [
    "lab.cli.arguments", "lab.cli.generate", "lab.cli.importing", "lab.cli.inputs", "lab.cli.main",
    "lab.cli.modelling", "lab.cli.outputs", "lab.cli.plan", "lab.cli.report", "lab.cli.show",
    "config", "lab.data.checks", "lab.data.generate", "lab.data.importers", "lab.data.jsonl",
    "lab.data.rollouts", "lab.data.shorten", "errors",
]  # fmt: skip


def _marked():
    """Modules whose docstring says that they are pure."""
    package = data.REPOSITORY / "megatron_prefix"
    docstrings = {
        ".".join(path.relative_to(package).with_suffix("").parts): ast.get_docstring(
            ast.parse(path.read_text(encoding="utf-8"))
        )
        for path in sorted(package.rglob("*.py"))
    }
    return [
        name for name, text in docstrings.items() if re.search(r"\[pure\]|\bPure[.:;]", text or "")
    ]


PURE = sorted({*_marked(), *_WITHOUT_MARK})
_HEAVY = """
import sys
heavy = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "megatron"})
if heavy:
    sys.exit(f"imported {heavy}")
"""


def in_fresh_interpreter(code):
    done = subprocess.run(
        [sys.executable, "-c", code + _HEAVY], cwd=data.REPOSITORY, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


_EACH = """
import importlib, json, os, sys, traceback
import numpy, rich.console  # which many of them import, once
for name in sys.argv[1:]:
    reader, writer = os.pipe()
    if not os.fork():
        try:
            importlib.import_module(f"megatron_prefix.{name}")
            found = sorted({one.partition(".")[0] for one in sys.modules} & {"torch", "megatron"})
        except BaseException:
            found = [traceback.format_exc()]
        os.write(writer, json.dumps(found).encode()[:4096])
        os._exit(0)
    os.close(writer)
    with open(reader) as answer:
        told = answer.read()
    print(json.dumps({name: told}), flush=True)
    os.wait()
    if told == "[]":  # then others need not import it once more
        importlib.import_module(f"megatron_prefix.{name}")
"""


def imported(*modules):
    """What each of them imports of the two, or why it cannot be imported, as JSON; each in a fork
    of an interpreter that has imported neither."""
    done = subprocess.run(
        [sys.executable, "-c", _EACH, *modules],
        cwd=data.REPOSITORY, capture_output=True, text=True, timeout=500, check=True,
    )  # fmt: skip
    found = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line)
    return found


@pytest.fixture(scope="module")
def of_pure_modules():
    return imported(*PURE)


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_needs_neither_torch_nor_megatron(module, of_pure_modules):
    assert of_pure_modules[module] == "[]"


@pytest.mark.parametrize("arguments", [
    ["plan", str(data.BUNDLED), "--json", "--pp", "2", "--chunk-tokens", "auto"],
    ["plan", str(data.BUNDLED), "--groups", "1", "--max-tokens", "100"],
])  # fmt: skip
def test_the_verb_plan_needs_neither_torch_nor_megatron(arguments):
    code = (
        "import sys\nfrom megatron_prefix.lab.cli.main import main\n"
        "if main({!r}):\n    sys.exit(1)\n"
    )
    in_fresh_interpreter(code.format(arguments))


def test_the_list_of_verbs_imports_none_of_them():
    code = """
import sys
from megatron_prefix.lab.cli.main import VERBS, make_parser
make_parser(None)
loaded = [name for name, _ in VERBS.values() if f"megatron_prefix.lab.cli.{name}" in sys.modules]
if loaded:
    sys.exit(f"imported {loaded}")
"""
    in_fresh_interpreter(code)
