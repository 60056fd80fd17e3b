"""What the tables of rows cover: values of axes, and pairs of them; and which rows add nothing.

    python -m tests.covering

prints how many pairs are in a row, and every row all of whose pairs others have too.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tests import test_cases as cases
from tests import test_cases_across_ranks as across
from tests import test_cases_of_trainers as trainers
from tests import test_cases_on_ranks as on_ranks
from tests import test_cases_with_graphs as graphs
from tests.cases import Row
from tests.judge import case_of

ON_ONE_RANK: tuple[Sequence[Row], ...] = (
    cases.ROWS, cases.MTP, cases.CALLS, cases.NOT_SHARED, graphs.ROWS,
    trainers.ODD, trainers.ORDINARY, trainers.KEPT, trainers.LATE,
)  # fmt: skip
BY_LAYOUT: tuple[Mapping[str, Sequence[Row]], ...] = (on_ranks.ON_RANKS, across.ACROSS)
_NUMBERS: dict[tuple[str, object], int] = {}
"""Of values, by what they are of."""


def rows() -> Iterator[Row]:
    """All that are equal, refused or left to the stock schedule; one with a mistake proves nothing
    about what is right."""
    yield from itertools.chain(*ON_ONE_RANK)
    for table in BY_LAYOUT:
        for layout, those in table.items():
            for each in those:
                if not each.mistake:
                    yield replace(each, values={**each.values, "layout": layout})


def pairs(row: Row) -> set[tuple[int, int]]:
    """Every two values of a row: of its case, named or not, of what comes out and what was run; a
    value is a number."""
    case = case_of(row)
    values = {name: getattr(case, name) for name in vars(case)}
    if case.options.startswith("across"):  # ranks are another kind of place where prompts cross
        values["layout"] += ", crossed"
    values |= {name: getattr(row, name) for name in ("mode", "expects", "says", "shares")}
    both = [*values.items(), *(("ran", name) for name in row.ran)]
    numbers = sorted(_NUMBERS.setdefault(value, len(_NUMBERS)) for value in both)
    return {*itertools.combinations(numbers, 2)}


def superfluous(table: Sequence[Row]) -> list[Row]:
    """Rows that could go, one after the other, without a pair that no other has."""
    of_rows = [pairs(each) for each in table]
    numbers = Counter(itertools.chain(*of_rows))
    left = []
    for each, its_pairs in zip(table, of_rows, strict=True):
        if all(numbers[pair] > 1 for pair in its_pairs):
            numbers.subtract(its_pairs)
            left.append(each)
    return left


def num_pairs(table: Sequence[Row]) -> int:
    return len(set().union(*map(pairs, table)))


if __name__ == "__main__":
    lines = [str(num_pairs([*rows()])), *map(str, superfluous([*rows()]))]
    sys.stdout.write("\n".join(lines) + "\n")
