"""Which rank computes what several data-parallel ranks have in common.  Pure: numpy only.

The longest first, each by the rank that has least to compute so far (R. L. Graham, "Bounds on
Multiprocessing Timing Anomalies", section 5).  With few spans a rank can have much more than
others at the end, by up to the shortest of them.  So then the busiest rank gives spans away, or
has them changed for shorter ones, as long as that helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

EVEN = 1.02
"""Of the mean: a rank that has no more to compute is left as it is. Levels of the trees follow one
another, and long spans that go to ranks in turn are even on each of them: changes for a percent or
two made a simulated step longer (benchmarks/LOG.md, 2026-11-26)."""


def owners_of(
    lengths: Sequence[int], ranks: Sequence[Sequence[int]], alone: Sequence[int]
) -> list[int]:
    """The rank that computes each span, one of those that have it.

    Args:
        lengths: positions of each span.
        ranks: that have it.
        alone: positions that every rank computes besides.
    """
    load, owners = [*alone], [0] * len(lengths)
    for number in np.argsort(-np.array(lengths, np.int64), kind="stable").tolist():
        owner, *others = ranks[number]
        for rank in others:
            if load[rank] < load[owner]:
                owner = rank
        load[owner] += lengths[number]
        owners[number] = owner
    _Evening(lengths, ranks, load, owners).run()
    return owners


class _Change(NamedTuple):
    """The busiest rank gives a span to another one, and takes a shorter one for it (-1: none)."""

    given: int
    taken: int
    to: int


class _Evening:
    """Owners of spans, and what ranks have to compute with them; both change."""

    def __init__(
        self,
        lengths: Sequence[int],
        ranks: Sequence[Sequence[int]],
        load: list[int],
        owner: list[int],
    ) -> None:
        self.lengths, self.ranks, self.load, self.owner = lengths, ranks, load, owner
        self.owned: list[list[int]] = [[] for _ in load]
        for number, rank in enumerate(owner):
            self.owned[rank].append(number)

    def run(self) -> None:
        """Each change makes the sum of the loads' squares less, so that it ends."""
        limit = EVEN * sum(self.load) / max(1, len(self.load))
        while max(self.load, default=0) > limit:
            busiest = self.load.index(max(self.load))
            change = self._best(busiest)
            if change is None:
                return
            self._move(change.given, change.to)
            if change.taken >= 0:
                self._move(change.taken, busiest)

    def _best(self, busiest: int) -> _Change | None:
        """After which the larger of two ranks' loads is least; None if no change makes it less."""
        least, best = self.load[busiest], None
        having = {rank for number in self.owned[busiest] for rank in self.ranks[number]}
        for other in sorted(having - {busiest}):  # in one order on all ranks
            if self.load[other] >= least:
                continue
            given = [number for number in self.owned[busiest] if other in self.ranks[number]]
            taken = [number for number in self.owned[other] if busiest in self.ranks[number]]
            shorter = np.array([0, *(self.lengths[number] for number in taken)], np.int64)
            moved = np.array([self.lengths[n] for n in given], np.int64)[:, None] - shorter
            after = np.maximum(self.load[busiest] - moved, self.load[other] + moved)
            place = int(after.argmin())
            if after.flat[place] < least:
                least = int(after.flat[place])
                one, two = divmod(place, len(shorter))
                best = _Change(given[one], taken[two - 1] if two else -1, other)
        return best

    def _move(self, number: int, rank: int) -> None:
        for one, sign in ((self.owner[number], -1), (rank, 1)):
            self.load[one] += sign * self.lengths[number]
        self.owned[self.owner[number]].remove(number)
        self.owned[rank].append(number)
        self.owner[number] = rank
