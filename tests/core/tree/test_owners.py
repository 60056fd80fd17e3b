"""Who computes what ranks have in common: as even as spans allow."""

from __future__ import annotations

import itertools
import random

import pytest

from megatron_prefix.features.across.owners import EVEN, owners_of

Case = tuple[list[int], list[tuple[int, ...]], list[int]]


def case(rng: random.Random, num_ranks: int, num: int) -> Case:
    """Lengths of spans, the ranks that have them, and what ranks have besides."""
    lengths = [rng.randint(1, 2000) for _ in range(num)]
    most = range(num_ranks)
    ranks = [tuple(sorted(rng.sample(most, rng.randint(2, num_ranks)))) for _ in lengths]
    return lengths, ranks, [rng.randint(0, 500) for _ in most]


def loads(found: list[int], lengths: list[int], alone: list[int]) -> list[int]:
    load = [*alone]
    for length, owner in zip(lengths, found, strict=True):
        load[owner] += length
    return load


def test_a_change_for_a_shorter_one() -> None:
    """The longest first, to whoever has least, gives 20 and 15; 18 and 17 are better."""
    lengths, alone = [9, 8, 7, 6, 5], [0, 0]
    found = owners_of(lengths, [(0, 1)] * 5, alone)
    assert sorted(loads(found, lengths, alone)) == [17, 18]


def test_what_only_some_ranks_have_stays_there() -> None:
    lengths, ranks = [10, 6, 4], [(0, 1), (1, 2), (0, 1)]
    found = owners_of(lengths, ranks, [0, 0, 20])
    assert found == [0, 1, 1]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_no_change_would_help_the_busiest(num_ranks: int) -> None:
    """Nor giving one of its spans away, nor changing one for another."""
    rng = random.Random(num_ranks)
    stopped = 0
    for _ in range(100):
        lengths, ranks, alone = case(rng, num_ranks, rng.randint(1, 30))
        found = owners_of(lengths, ranks, alone)
        assert all(owner in some for owner, some in zip(found, ranks, strict=True))
        load = loads(found, lengths, alone)
        most, mean = max(load), sum(load) / num_ranks
        if most <= EVEN * mean:
            continue
        stopped += 1
        busiest = load.index(most)
        for one, two in itertools.product(range(len(lengths)), [-1, *range(len(lengths))]):
            if found[one] != busiest:
                continue
            others = ranks[one] if two < 0 else {found[two]} & {*ranks[one]}
            if two >= 0 and busiest not in ranks[two]:
                continue
            moved = lengths[one] - (lengths[two] if two >= 0 else 0)
            for other in {*others} - {busiest}:
                assert max(most - moved, load[other] + moved) >= most
    assert stopped > 10


def test_near_the_best_of_all() -> None:
    rng = random.Random(5)
    worst = 1.0
    for _ in range(60):
        lengths, ranks, alone = case(rng, 3, rng.randint(1, 7))
        best = min(max(loads([*each], lengths, alone)) for each in itertools.product(*ranks))
        worst = max(worst, max(loads(owners_of(lengths, ranks, alone), lengths, alone)) / best)
    assert 1 <= worst < 1.1  # 1.22 without changes


def test_nothing_in_common() -> None:
    assert owners_of([], [], [3, 4]) == []
    assert owners_of([], [], []) == []
