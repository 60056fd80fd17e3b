"""Messages and log lines that documents show are those of the code."""

import ast
import re

import pytest

from tests.harness.data import REPOSITORY

DOCS = REPOSITORY / "docs"
GAP = "…"
"""Stands for a value, in a document and here in an f-string."""


def quoted(text):
    return re.findall(r"^### `([^`]*)`$", text, re.M)


def logged(text):
    """Log lines that a page shows, each a code block of its own."""
    blocks = re.findall(r"^```log\n(.*?)^```$", text, re.M | re.S)
    return [" ".join(block.split()) for block in blocks]


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


def formats(known):
    """What lines can come of the texts that have gaps, or places as logging fills them."""
    places = re.compile(rf"%[\d.]*[sdfg]|{GAP}")
    found = [" ".join(text.split()) for text in known if places.search(text)]
    # Of a text that is all gaps nothing can be told.
    told = [text for text in found if len(re.findall(r"\w{2,}", places.sub("", text))) > 2]
    return [re.compile(".+".join(map(re.escape, places.split(text)))) for text in told]


def test_messages_that_are_explained_exist():
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    messages, known = quoted(page), all_texts()
    assert len(messages) > 25
    assert [message for message in messages if not said(message, known)] == []


BEGINS = re.compile(r"megatron_prefix \S+ in .+ \(megatron-core \S+, torch \S+\): mode \w+")


def test_log_lines_that_are_shown_are_written():
    pages = sorted(DOCS.rglob("*.md"))
    lines = [line for page in pages for line in logged(page.read_text(encoding="utf-8"))]
    assert len(lines) > 15
    known = [*formats(all_texts()), BEGINS]
    assert [line for line in lines if not any(one.match(line) for one in known)] == []


@pytest.mark.parametrize("line", [
    "stock schedule for this step: it is slow", "stock schedule today: it is slow",
], ids=["right", "wrong"])  # fmt: skip
def test_a_log_line_is_told_from_another(line):
    (one,) = formats(["stock schedule for this step: %s", "%s: %s"])
    assert (one.match(line) is not None) == line.startswith("stock schedule for")


def test_the_check_can_fail():
    page = "# A\n\n### `no … such …`\n\nx\n\n### `is cut`\n### Else\n```log\na\nb\n```\n"
    assert quoted(page) == ["no … such …", "is cut"] and logged(page) == ["a b"]
    known = list(texts("raise E(f'no {thing} of '\n        f'such {name} here')"))
    assert said("no … such …", known) and not said("such … no", known)
