"""The table of refusals: every place that refuses uses it, and every line is used."""

import ast
import pickle
from collections import Counter
from types import SimpleNamespace

import pytest

from megatron_prefix import trainers
from megatron_prefix.errors import GAP, NOT_YET, WRONG, CannotShare, Refusal, UserError, refused
from megatron_prefix.refusals import table
from megatron_prefix.refusals.table import GROUPS, OPTIONS, TABLE
from tests.harness.data import REPOSITORY

CORE = REPOSITORY / "megatron_prefix"
NAMES = {name: value for name, value in vars(table).items() if isinstance(value, Refusal)}


def sources():
    """Files of the core that may refuse, without those that say how."""
    for path in sorted(CORE.rglob("*.py")):
        name = str(path.relative_to(CORE))
        if not name.startswith(("lab/", "refusals/table")) and name != "errors.py":
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def called(node):
    """The name of the function or class that an expression calls; "" for another expression."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "id", "") or getattr(node.func, "attr", "")


def said(tree):
    """Refusals that are raised or yielded by name, and how many values each gets."""
    for node in ast.walk(tree):
        if called(node) == "refused" and isinstance(node.args[0], ast.Name):
            yield node.args[0].id, len(node.args) - 1
        elif called(node) == "given" and isinstance(getattr(node.func, "value", None), ast.Name):
            yield node.func.value.id, len(node.args)


def makes_one(tree):
    return "CannotShare" in map(called, ast.walk(tree))


def test_nothing_else_makes_the_error_of_a_refusal():
    assert [name for name, tree in sources() if makes_one(tree)] == []
    assert makes_one(ast.parse("raise CannotShare('no')"))
    assert makes_one(ast.parse("x = errors.CannotShare('no')"))


def test_no_line_is_unused():
    used = {
        node.id for _, tree in sources() for node in ast.walk(tree) if isinstance(node, ast.Name)
    }
    assert {name for name, one in NAMES.items() if one not in OPTIONS} - used == set()


def test_every_place_gives_a_value_for_each_gap():
    """Else a refusal would end in an error of its own."""
    found = [one for _, tree in sources() for one in said(tree) if one[0] in NAMES]
    assert {name for name, one in NAMES.items() if GAP in one.name + one.fix} <= {*dict(found)}
    for name, num in found:
        text = f"{NAMES[name].name}: {NAMES[name].fix}"
        assert text.count(GAP) == num, name


def test_lines_are_whole():
    assert len(TABLE) == len(NAMES) > 100
    assert Counter(one.name for one in TABLE).most_common(1)[0][1] == 1
    places = [*GROUPS]
    assert [places.index(one.where) for one in TABLE] == sorted(
        places.index(one.where) for one in TABLE
    )
    for one in TABLE:
        assert one.where in GROUPS and one.kind in (WRONG, NOT_YET), one
        assert one.name and len(one.fix.split()) > 1 and "\n" not in one.name + one.fix, one
        assert not one.fix.endswith(".") and "|" not in one.name + one.fix, one
        assert (one.where == "config") == (one.is_on is not None), one


def test_trainers_name_their_own_lines():
    named = [one for trainer in trainers.TRAINERS for one in trainer.refused]
    for trainer in trainers.TRAINERS:
        assert all(one.where == trainer.name for one in trainer.refused)
    names = {trainer.name for trainer in trainers.TRAINERS}
    assert {*named} == {one for one in TABLE if one.where in names}


def test_values_are_put_in_and_the_error_has_its_refusal():
    found = refused(table.COLUMN_LENGTH, "labels", 2, 3)
    assert str(found).startswith("labels of a model call has 2 of 3 positions: give one")
    assert type(found) is CannotShare and found.refusal is table.COLUMN_LENGTH
    ended = refused(table.UNEVEN_MICROBATCHES, 2, 3)
    assert type(ended) is UserError and ended.refusal is table.UNEVEN_MICROBATCHES
    assert UserError("x").refusal is None
    with pytest.raises(ValueError, match="zip"):
        refused(table.COLUMN_LENGTH, "labels", 2)


@pytest.mark.parametrize("refusal", [*OPTIONS, table.NOT_CAUSAL], ids=lambda one: one.name)
def test_an_error_reaches_another_process_with_its_refusal(refusal):
    found = pickle.loads(pickle.dumps(refused(refusal)))  # noqa: S301  # our own
    assert type(found) is CannotShare and found.refusal == refusal
    if refusal.is_on is not None:
        assert not found.refusal.is_on(SimpleNamespace())
