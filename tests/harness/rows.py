"""Rows of a test, of which a run of the whole suite leaves some out.

Cases here are rows of axes: a layout, a memory policy, a model, a form of call. A row is marked
`products` where each of its values stands in a row that is not: what it adds is that they go
together. Every value of every axis, every pair that code asks for together, and every mistake that
is made on purpose stays. Among rows that show the same, the cheapest stays.

What is left takes more than a quarter of an hour on two cores. So in files marked `turns`, and in
jobs of many cases, a run of the whole suite has the first row and every third of the others; which,
the commit says, and TEST_TURN.
"""

import os
import subprocess

import pytest

EVERYTHING = "TEST_EVERYTHING"
"""Variable that tests/conftest.py sets where nothing is left out."""
TURN, TURNS = "TEST_TURN", 3
"""Variable that says whose turn it is, from 0; and how many there are."""


def rows(every, products):
    """Parameters for `pytest.mark.parametrize`: a value or a tuple of values each."""
    found = [*every]
    assert all(one in found for one in products), products
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.products)
        if one in products
        else one
        for one in found
    ]


def through(every, products):
    """What a test goes through by itself: all of it, or what is no product."""
    found = [*every]
    assert all(one in found for one in products), products
    return [one for one in found if EVERYTHING in os.environ or one not in products]


def turn_of(repository):
    """Whose turn it is by the commit; 0 outside of a repository."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return 0
    return int(found.stdout.strip() or "0", 16) % TURNS


def check_turn():
    """Refuses a turn that there is not: of the rows that take turns only the first would run."""
    given = os.environ[TURN]
    if given not in map(str, range(TURNS)):
        raise pytest.UsageError(f"{TURN}={given}: give 0 to {TURNS - 1}, or leave it out")


def takes_its_turn(number):
    """Whether a row is run, by its number among those of a test."""
    if number == 0 or EVERYTHING in os.environ:
        return True
    return number % TURNS == int(os.environ.get(TURN, "0"))


def taking_turns(every):
    """What a test goes through by itself: the first, and of the others those whose turn it is."""
    return [one for number, one in enumerate(every) if takes_its_turn(number)]


def chosen(request, *arguments):
    """Rows of a file that are run: values of one argument of its tests, or tuples of several."""
    found = []
    for item in request.session.items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if item.path == request.path and {*arguments} <= {*params}:
            values = [params[argument] for argument in arguments]
            found.append(values[0] if len(values) == 1 else (*values,))
    return found
