"""A bounded number of seeds that cover pairs of values of two axes.

Run as a script it looks for them: `python -m tests.oracle.pairs` prints the seeds, of which the
first are to be put below.
"""

from __future__ import annotations

import itertools

from tests.oracle.case import AXES, Case, draw

DENSE = 14
"""Axes with odd values in such a case: most of them fall back, and must do so without a trace."""
LOOKED_AT = 4000
SEEDS = (
    0, 3003, 2314, 2147, 1979, 609, 1228, 726, 2308, 3164, 916, 3032, 1862, 1605, 2425, 3347,
    3175, 1734, 2693, 1130, 2665, 2649, 3656, 502, 3262, 2779, 1270, 3902,
)  # fmt: skip
"""The first of what `covering` finds among the first LOOKED_AT seeds."""


def pairs(case: Case) -> set[tuple[str, str, str, str]]:
    """Every two values of a case."""
    values = [(name, getattr(case, name)) for name in AXES]
    return {(*one, *other) for one, other in itertools.combinations(values, 2)}


def cases(*, every: bool = False) -> list[Case]:
    """The cases of the seeds; of `every` one that there must be for all pairs that were found."""
    seeds = covering(10_000, LOOKED_AT)[0] if every else SEEDS
    return [draw(seed, 1, DENSE) for seed in seeds]


def covering(most: int, seeds: int) -> tuple[list[int], int, int]:
    """Seeds, greedily: each has the most pairs that none before it had.

    Args:
        most: seeds to be found at most.
        seeds: how many are looked at.

    Returns:
        The seeds, how many pairs they cover, and how many all that were looked at do.
    """
    numbers: dict[tuple[str, str, str, str], int] = {}
    masks: dict[int, int] = {}
    for seed in range(seeds):
        found = pairs(draw(seed, 1, DENSE))
        masks[seed] = sum(1 << numbers.setdefault(pair, len(numbers)) for pair in found)
    gains = dict.fromkeys(masks, len(numbers))
    chosen: list[int] = []
    seen = 0
    while len(chosen) < most:
        best = max(gains, key=gains.__getitem__)
        true = (masks[best] & ~seen).bit_count()
        if true < gains[best]:  # a gain only shrinks: look again
            gains[best] = true
            continue
        if not true:
            break
        chosen.append(best)
        seen |= masks[best]
        del gains[best]
    return chosen, seen.bit_count(), len(numbers)


if __name__ == "__main__":
    print(*covering(10_000, LOOKED_AT))
