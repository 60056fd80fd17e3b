"""Generated parts of documents are what the code says, and it has a line for everything."""

import dataclasses
import re

import pytest

from megatron_prefix import __version__
from megatron_prefix.config import PrefixConfig
from megatron_prefix.refusals.table import TABLE
from megatron_prefix.run.calls import Callbacks
from tests.harness.data import REPOSITORY
from tests.repository import generated


def test_generated_parts_are_current():
    old = [str(path) for path, _ in generated.stale()]
    assert old == [], f"{generated.COMMAND} writes them"


@pytest.mark.parametrize("kind", [PrefixConfig, Callbacks])
def test_every_field_is_described(kind):
    names = [field.name for field in dataclasses.fields(kind)]
    assert [*generated.attributes(kind)] == names


def test_every_refusal_has_its_row():
    rows = [line for line in generated.refusals().splitlines() if line.count("|") == 5]
    heads = [line for line in rows if line.startswith(("| refused |", "|---"))]
    assert len(rows) - len(heads) == len(TABLE)


def test_a_part_that_is_old_is_made_anew():
    page = f"# A\n<!-- b: {generated.COMMAND} -->\nold\n<!-- end of b -->\nc\n"
    new = generated.written(page, {"b": lambda: "new\n"})
    assert new == page.replace("old", "new")


@pytest.mark.parametrize("name", ["CITATION.cff", "docs/citing.md"])
def test_a_citation_has_the_version(name):
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    assert re.findall(r"^\s*version(?: =|:) \{?([\d.]+)", text, re.M) == [__version__]
