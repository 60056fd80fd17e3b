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
"""Loads up to this multiple of the mean stay. Levels run one after another, and long spans dealt in
turn are even on each level: moves for the last percents made a simulated step longer
(benchmarks/LOG.md, "Evening out owners")."""


def owners_of(
    lengths: Sequence[int], ranks: Sequence[Sequence[int]], local_only: Sequence[int]
) -> list[int]:
    """The rank that computes each span.

    Args:
        lengths: positions of each span.
        ranks: those that have each span.
        local_only: per rank the positions that it computes besides.
    """
    load, owners = [*local_only], [0] * len(lengths)
    for number in np.argsort(-np.array(lengths, np.int64), kind="stable").tolist():
        owner, *holders = ranks[number]
        for rank in holders:
            if load[rank] < load[owner]:
                owner = rank
        load[owner] += lengths[number]
        owners[number] = owner
    _Evening(lengths, ranks, load, owners).run()
    return owners


class _OwnerChange(NamedTuple):
    """The busiest rank gives a span to `to`, and takes a shorter one in return (-1: none)."""

    from_busiest: int
    in_return: int
    to: int


class _Evening:
    """Moves spans between owners until loads are even."""

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
        """Ends, as each change lowers the sum of squared loads."""
        limit = EVEN * sum(self.load) / max(1, len(self.load))
        while max(self.load, default=0) > limit:
            busiest = self.load.index(max(self.load))
            change = self._best(busiest)
            if change is None:
                return
            self._move(change.from_busiest, change.to)
            if change.in_return >= 0:
                self._move(change.in_return, busiest)

    def _best(self, busiest: int) -> _OwnerChange | None:
        """The change that minimises the larger of the two loads; None if none lowers it."""
        least, best = self.load[busiest], None
        having = {rank for number in self.owned[busiest] for rank in self.ranks[number]}
        for peer in sorted(having - {busiest}):  # in one order on all ranks
            if self.load[peer] >= least:
                continue
            outgoing = [number for number in self.owned[busiest] if peer in self.ranks[number]]
            incoming = [number for number in self.owned[peer] if busiest in self.ranks[number]]
            shorter = np.array([0, *(self.lengths[number] for number in incoming)], np.int64)
            moved = np.array([self.lengths[n] for n in outgoing], np.int64)[:, None] - shorter
            after = np.maximum(self.load[busiest] - moved, self.load[peer] + moved)
            place = int(after.argmin())
            if after.flat[place] < least:
                least = int(after.flat[place])
                row, column = divmod(place, len(shorter))
                best = _OwnerChange(outgoing[row], incoming[column - 1] if column else -1, peer)
        return best

    def _move(self, number: int, rank: int) -> None:
        for owner, sign in ((self.owner[number], -1), (rank, 1)):
            self.load[owner] += sign * self.lengths[number]
        self.owned[self.owner[number]].remove(number)
        self.owned[rank].append(number)
        self.owner[number] = rank
