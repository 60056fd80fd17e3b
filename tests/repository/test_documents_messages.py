"""Messages that docs/operations.md explains are those of the code."""

import ast
import re

from tests.harness.data import REPOSITORY

OPERATIONS = REPOSITORY / "docs" / "operations.md"
GAP = "…"
"""Stands for a value, in a document and here in an f-string."""


def quoted(text):
    """Messages in the first column of the tables under Troubleshooting."""
    part = re.split(r"^## ", text, flags=re.M)
    (section,) = [one for one in part if one.startswith("Troubleshooting")]
    return re.findall(r'^\| [^|"]*"([^|]*)" \|', section, re.M)


def texts(source):
    """Every string of a module, with gaps for the values of an f-string."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [one.value if isinstance(one, ast.Constant) else GAP for one in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def said(message, known):
    """Whether one text has all of a message, in its order."""
    pattern = ".*".join(map(re.escape, filter(None, message.split(GAP))))
    return any(re.search(pattern, text, re.S) for text in known)


def all_texts():
    files = (REPOSITORY / "megatron_prefix").rglob("*.py")
    return [text for file in files for text in texts(file.read_text(encoding="utf-8"))]


def test_messages_that_are_explained_exist():
    messages, known = quoted(OPERATIONS.read_text(encoding="utf-8")), all_texts()
    assert len(messages) > 25
    assert [message for message in messages if not said(message, known)] == []


def test_the_check_can_fail():
    rows = '| "no … such …" | x |\n| a file "is cut" | y |\n| slow | z |\n'
    table = f"## Troubleshooting\n{rows}## Limits\n"
    assert quoted(table) == ["no … such …", "is cut"]
    known = list(texts("raise E(f'no {thing} of '\n        f'such {name} here')"))
    assert said("no … such …", known) and not said("such … no", known)
