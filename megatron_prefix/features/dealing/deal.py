"""Which data-parallel rank runs which rollouts, where that can be chosen.  Pure: numpy only.

A rank runs what its rollouts of a group begin with once, so its load is not the sum of what its
rollouts cost alone. Whole groups go to the ranks, the costliest first, each to the rank with the
least load (Graham, "Bounds on multiprocessing timing anomalies", 1969). A group is split where it
would raise every rank above a limit, and each rank of its parts then runs its beginning. Which
limit is best depends on what splitting repeats, so several are tried. At last the rank with the
largest load swaps single rollouts with others, as long as that lowers it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prefix.errors import UserError

LIMITS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4, 2.0, math.inf)
"""Of a rank's load, times the mean of whole groups, or the costliest rollout if that is more."""
LEAST_GAIN = 0.01
"""Part of the largest load: splitting and swapping have to lower it by more."""


def cost_of_length(length: int, quadratic: float) -> float:
    """What the first positions of a rollout cost, in costs of one without attention; `quadratic`:
    half the cost of attention to one key, 0 counts tokens."""
    return length + quadratic * length**2


@dataclass(frozen=True)
class DealtCosts:
    """What ranks run, for any dealing of these rollouts.

    Attributes:
        group: number of each rollout's group, int [rollouts].
        beginning: cost of what the rollouts of each group begin with, float [groups].
        own: cost of what each rollout has behind that, float [rollouts].
    """

    group: np.ndarray
    beginning: np.ndarray
    own: np.ndarray

    @classmethod
    def of(
        cls, groups: Sequence[Hashable], costs: Sequence[float], shared: Sequence[float]
    ) -> DealtCosts:
        """The arguments are those of `deal`."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(groups))}
        group = np.array([numbers[name] for name in groups], int)
        beginning = np.full(len(numbers), math.inf)
        np.minimum.at(beginning, group, np.array(shared, float))
        return cls(group, beginning, np.array(costs, float) - beginning[group])

    def load(self, part: Sequence[int] | np.ndarray) -> float:
        """What a rank with these rollouts runs."""
        numbers = np.array(part, int)
        return float(self.own[numbers].sum() + self.beginning[np.unique(self.group[numbers])].sum())


def deal(
    groups: Sequence[Hashable],
    costs: Sequence[float],
    shared: Sequence[float],
    num_ranks: int,
    *,
    equal: bool = False,
) -> list[list[int]]:
    """The rollouts of every rank: whole groups, balanced by what ranks run.

    Every rollout is on one rank. A group is split where groups are too few or one is too large, and
    with `equal` also where counts would differ. The answer depends on the arguments only.

    Args:
        groups: the name of each rollout's group.
        costs: of each rollout alone; see `cost_of_length`.
        shared: the part of it that any of its siblings on the same rank has run, too.
        num_ranks: to deal to.
        equal: whether every rank gets equally many rollouts.

    Returns:
        Per rank its rollouts' numbers: siblings side by side, in the order given. Without `equal` a
        rank may have none.

    Raises:
        UserError: no rank, or, with `equal`, a number of rollouts that `num_ranks` does not divide.
    """
    if num_ranks < 1:
        raise UserError(f"{num_ranks} ranks to deal rollouts to: give 1 or more")
    if equal and len(groups) % num_ranks:
        raise UserError(
            f"{len(groups)} rollouts, equally many for each of {num_ranks} ranks: give a multiple"
            f" of {num_ranks}"
        )
    rollouts = DealtCosts.of(groups, costs, shared)
    room = len(groups) // num_ranks if equal else len(groups)
    mean = float(rollouts.own.sum() + rollouts.beginning.sum()) / num_ranks
    least = max([mean, *costs])
    tried = [_greedy(rollouts, num_ranks, factor * least, room) for factor in LIMITS]
    ranks = _swapped(rollouts, _best(rollouts, tried))
    return [sorted(part, key=lambda number: (rollouts.group[number], number)) for part in ranks]


def _best(rollouts: DealtCosts, tried: Sequence[list[list[int]]]) -> list[list[int]]:
    """The dealing in which ranks run least together, of those with nearly the smallest largest
    load."""
    loads = [[rollouts.load(part) for part in ranks] for ranks in tried]
    limit = min(map(max, loads)) * (1 + LEAST_GAIN)
    costs = [(max(load) > limit, sum(load)) for load in loads]
    return tried[costs.index(min(costs))]


def _greedy(rollouts: DealtCosts, num_ranks: int, limit: float, room: int) -> list[list[int]]:
    """Rollouts of every rank: at most `room`, and below the limit where that is possible.

    The next rollouts go to the rank that runs least with their beginning: a whole group, or as many
    as the rank has room for and the limit allows, but one at least. So a load above the limit is
    above the least one by no more than a rollout with its beginning, if ranks have room.
    """
    load = [0.0] * num_ranks
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = rollouts.beginning + np.bincount(rollouts.group, rollouts.own, len(rollouts.beginning))
    for group in np.argsort(-totals, kind="stable"):
        members = np.flatnonzero(rollouts.group == group)
        remaining = members[np.argsort(-rollouts.own[members], kind="stable")]
        added = [float(rollouts.beginning[group])] * num_ranks
        while len(remaining):
            ranked = sorted(range(num_ranks), key=lambda rank: load[rank] + added[rank])
            rank = next((r for r in ranked if len(ranks[r]) + len(remaining) <= room), -1)
            after = load[rank] + added[rank] + np.cumsum(rollouts.own[remaining])
            if rank < 0 or after[-1] > limit:
                rank = next(r for r in ranked if len(ranks[r]) < room)
                after = load[rank] + added[rank] + np.cumsum(rollouts.own[remaining])
            num = max(1, min(int(np.sum(after <= limit)), room - len(ranks[rank])))
            ranks[rank] += remaining[:num].tolist()
            load[rank], added[rank], remaining = float(after[num - 1]), 0.0, remaining[num:]
    return ranks


def _swapped(rollouts: DealtCosts, ranks: Sequence[Sequence[int]]) -> list[list[int]]:
    """The rank with the largest load swaps a rollout with a rank that has less to run: the pair
    that leaves the two with the smallest largest load, again and again."""
    parts = [np.array(part, int) for part in ranks]
    num_groups = len(rollouts.beginning)
    counts = [np.bincount(rollouts.group[part], minlength=num_groups) for part in parts]
    loads = np.array([rollouts.load(part) for part in parts])
    for _ in range(len(rollouts.own)):
        most = int(loads.argmax())
        for least in np.argsort(loads, kind="stable").tolist():
            if least == most:
                continue
            ours = _after_swaps(rollouts, parts, counts, loads, most, least)
            theirs = _after_swaps(rollouts, parts, counts, loads, least, most).T
            worst = np.maximum(ours, theirs)
            if worst.size and worst.min() < loads[most] * (1 - LEAST_GAIN):
                break
        else:
            break
        local_place, peer_place = np.unravel_index(worst.argmin(), worst.shape)
        loads[most], loads[least] = ours[local_place, peer_place], theirs[local_place, peer_place]
        parts[most][local_place], parts[least][peer_place] = (
            parts[least][peer_place],
            parts[most][local_place],
        )
        for rank in (most, least):
            counts[rank] = np.bincount(rollouts.group[parts[rank]], minlength=num_groups)
    return [part.tolist() for part in parts]


def _after_swaps(
    rollouts: DealtCosts,
    parts: Sequence[np.ndarray],
    counts: Sequence[np.ndarray],
    loads: np.ndarray,
    rank: int,
    peer: int,
) -> np.ndarray:
    """A rank's load after swapping a rollout for a peer's: float [its rollouts, the peer's].

    Args:
        parts: rollouts of every rank.
        counts: of every rank and group the rollouts.
        loads: of every rank.
        rank, peer: the two ranks.
    """
    local, theirs = parts[rank], parts[peer]
    gone, new = rollouts.group[local], rollouts.group[theirs]
    lost_costs = rollouts.own[local] + rollouts.beginning[gone] * (counts[rank][gone] == 1)
    gained_costs = rollouts.own[theirs] + rollouts.beginning[new] * (counts[rank][new] == 0)
    siblings = rollouts.own[theirs] - rollouts.own[local][:, None]
    change = np.where(gone[:, None] == new, siblings, gained_costs - lost_costs[:, None])
    return np.asarray(loads[rank] + change)
