"""Tests use what a room exports, so that the next move of its inside rewrites none, and their own
names are short."""

import ast
from collections import Counter

from tests.harness.data import REPOSITORY

MOST = 45
"""Uses of private names of the package that are left. Lower it with every one that goes."""
FOREIGN = {"_actions", "_axis", "_modules", "_ssm_training"}
"""Of argparse, torch, Megatron and ModelOpt; the package has names that read the same."""


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name.strip("_").isidentifier()


def defined(tree):
    """Private names that a file gives to something."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return set(filter(is_private, found))


def used(tree):
    """Private names that a test takes from elsewhere: attributes, imports, and names in strings.

    What a class of the test's own file keeps on itself is its own.
    """
    own = defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            on_itself = isinstance(node.value, ast.Name) and node.value.id == "self"
            if not (on_itself and node.attr in own):
                yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.rpartition(".")[2]


def counted(folder, names):
    """Uses of `names` in every file below a folder, most first."""
    found = Counter()
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        found[str(path.relative_to(folder))] = sum(name in names for name in used(tree))
    return found


def test_few_private_names_are_used():
    package = [*(REPOSITORY / "megatron_prefix").rglob("*.py")]
    names = set().union(*(defined(ast.parse(path.read_text("utf-8"))) for path in package))
    found = counted(REPOSITORY / "tests", names - FOREIGN)
    most = "\n".join(f"{num} in {name}" for name, num in found.most_common(8))
    assert found.total() <= MOST, f"{found.total()} uses, {MOST} are allowed; most:\n{most}"
    assert found.total() > MOST - 10, f"only {found.total()} uses are left: lower MOST"


LONGEST = 60
"""Characters of a test's name."""


def test_names_of_tests_fit_a_line():
    long = [
        f"{path.name}: {node.name}"
        for path in REPOSITORY.joinpath("tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if len(node.name) > LONGEST
    ]
    assert not long
