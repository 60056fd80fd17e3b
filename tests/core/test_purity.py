"""Modules that must import neither torch nor Megatron, each in a process that has not."""

import ast
import json
import re
import subprocess
import sys

import pytest

from tests.harness import data

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


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", str(data.BUNDLED), "--json", "--pp", "2", "--chunk-tokens", "auto"],
        ["plan", str(data.BUNDLED), "--groups", "1", "--max-tokens", "100"],
    ],
)
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
