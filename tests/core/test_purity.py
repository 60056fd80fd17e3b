"""Modules that must import neither torch nor Megatron, each in a fresh interpreter."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tests.harness import data

_WITHOUT_MARK = [
    "lab.cli.arguments",
    "lab.cli.generate",
    "lab.cli.importing",
    "lab.cli.inputs",
    "lab.cli.main",
    "lab.cli.modelling",
    "lab.cli.outputs",
    "lab.cli.plan",
    "lab.cli.report",
    "lab.cli.show",
    "config",
    "lab.data.checks",
    "lab.data.generate",
    "lab.data.importers",
    "lab.data.jsonl",
    "lab.data.rollouts",
    "lab.data.shorten",
    "errors",
]


def _marked() -> list[str]:
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


def in_fresh_interpreter(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code + _HEAVY],
        cwd=data.REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_needs_neither_torch_nor_megatron(module) -> None:
    in_fresh_interpreter(f"import megatron_prefix.{module}\n")


def test_marks_are_found() -> None:
    assert {"tree.build", "plan.simulator", "lab.runtime.layout", "lab.view.svg"} <= set(_marked())


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", str(data.BUNDLED), "--json", "--pp", "2", "--chunk-tokens", "auto"],
        ["plan", str(data.BUNDLED), "--groups", "1", "--max-tokens", "100"],
    ],
)
def test_the_verb_plan_needs_neither_torch_nor_megatron(arguments) -> None:
    code = (
        "import sys\nfrom megatron_prefix.lab.cli.main import main\n"
        "if main({!r}):\n    sys.exit(1)\n"
    )
    in_fresh_interpreter(code.format(arguments))


def test_the_list_of_verbs_imports_none_of_them() -> None:
    code = """
import sys
from megatron_prefix.lab.cli.main import VERBS, make_parser
make_parser(None)
loaded = [name for name, _ in VERBS.values() if f"megatron_prefix.lab.cli.{name}" in sys.modules]
if loaded:
    sys.exit(f"imported {loaded}")
"""
    in_fresh_interpreter(code)


def test_the_check_itself_sees_torch() -> None:
    with pytest.raises(AssertionError, match=r"imported \['torch'\]"):
        in_fresh_interpreter("import sys\nsys.modules['torch'] = sys\n")
