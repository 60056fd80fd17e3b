"""Which data-parallel rank computes which rollouts. [pure]

A rank's load is the cost of its *trees* (plan/cost.py), not the sum of its rollouts: a prompt that
sixteen rollouts share counts once. Rollouts are put in depth-first order of the trees, in which
neighbours share most, and are cut into one consecutive part a rank by binary search on the largest
load ("AReaL-DTA", section 4 and appendix, algorithm 4). This is done over whole groups and over
single rollouts, and compared with greedy placement of whole groups, the costliest first. Where a
group is cut, every part computes the prompt again, and its cost counts that.

The result depends on the arguments only, so every rank finds the same placement.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatron_prefix.errors import UserError
from megatron_prefix.features.dealing.deal import deal
from megatron_prefix.lab.data.pairs import pairs_of, pairs_of_groups
from megatron_prefix.lab.data.rollouts import Group, common_prefix
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.tree import Forest, Segment, Span, TreeOptions, build

METHODS = ("auto", "whole", "cut", "greedy", "tokens", "equal")
MIN_GAIN_OF_CUT = 0.05
"""A group is cut only where that lowers the largest load by more than this fraction."""
_STEPS = 50  # halvings of the interval in which the largest load lies


@dataclass(frozen=True)
class Placement:
    """Rollouts by rank.

    Attributes:
        ranks: per rank its groups, in the order given; a group that was cut is in several, under
            the same name, each time with a part of its rollouts. A rank may have none.
        method: the one that made it; never "auto".
        cost: the cost model.
        options: how a rank's rollouts become segments.
    """

    ranks: tuple[tuple[Group, ...], ...]
    method: str
    cost: CostModel
    options: TreeOptions

    @cached_property
    def forests(self) -> tuple[Forest, ...]:
        """Each rank's segments; built on first use."""
        return tuple(build(*pairs_of_groups(groups), self.options) for groups in self.ranks)

    @property
    def costs(self) -> tuple[float, ...]:
        """Forward FLOPs of each rank; each part of a cut group has its own prefix."""
        return tuple(map(self.cost.prefix, self.forests))

    @property
    def executed_tokens(self) -> int:
        """Positions that all ranks compute."""
        return sum(forest.executed_tokens for forest in self.forests)

    @property
    def imbalance(self) -> float:
        """Largest load over the mean: 1 is perfect; 0 if no rank has anything."""
        costs = self.costs
        return max(costs) * len(costs) / sum(costs) if sum(costs) else 0.0

    @property
    def num_cut(self) -> int:
        """Groups that are on more than one rank."""
        names = [name for groups in self.ranks for name in {group.name for group in groups}]
        return len(names) - len(set(names))


def place(
    groups: Sequence[Group],
    num_ranks: int,
    cost: CostModel,
    options: TreeOptions | None = None,
    method: str = "auto",
) -> Placement:
    """Puts every rollout on exactly one rank.

    Methods:
        whole: cuts the depth-first order between groups so that the largest load is least.
        cut: the same between rollouts.
        greedy: whole groups, the costliest first, each to the rank with the least load.
        tokens: the same with a group's raw tokens as its cost, as trainers without sharing do.
        equal: equally many rollouts a rank, and whole groups as far as that allows
            (features/dealing/deal.py); Megatron's own schedule needs that if ranks meet in every
            microbatch.
        auto: the better of "whole" and "greedy"; "cut" where its largest load is lower by more than
            MIN_GAIN_OF_CUT.

    Args:
        groups: of one step, names all different.
        num_ranks: data-parallel size.
        cost: of the model.
        options: how a rank's rollouts become segments; with share="batch" groups share too.
        method: one of METHODS.

    Raises:
        UserError: no such method, no rank, two groups of one name, or, with "equal", a number of
            rollouts that `num_ranks` does not divide.
    """
    options = options or TreeOptions()
    if method not in METHODS:
        raise UserError(f"placement {method!r}: give one of {', '.join(METHODS)}")
    if num_ranks < 1:
        raise UserError(f"{num_ranks} ranks to place rollouts on: give 1 or more")
    if len({group.name for group in groups}) < len(groups):
        raise UserError(
            f"{len(groups)} groups to place, but not as many names: name each differently"
        )
    leaves = Leaves(groups, cost, options)
    if method == "auto":
        method, parts = _best(leaves, num_ranks)
    else:
        parts = partition(leaves, num_ranks, method)
    ranks = [parts_of(groups, [leaves.order[leaf][:2] for leaf in part]) for part in parts]
    ranks += [()] * (num_ranks - len(ranks))
    return Placement(tuple(ranks), method, cost, options)


class _Leaf(NamedTuple):
    """A rollout in depth-first order.

    Attributes:
        group, rollout: where it is in the groups given.
        length: its positions.
        first_trained: the first of them with loss.
        shared: leading positions that the leaf before it has, too, if they are in one tree.
    """

    group: int
    rollout: int
    length: int
    first_trained: int
    shared: int


Part = Sequence[int]  # numbers of leaves, ascending


class Leaves:
    """The rollouts of a step in depth-first order, and the cost of any part of them on one rank."""

    def __init__(self, groups: Sequence[Group], cost: CostModel, options: TreeOptions) -> None:
        self.cost, self.options = cost, options
        self.order = tuple(_depth_first(groups, options))
        sizes = [len(list(run)) for _, run in itertools.groupby(self.order, lambda x: x.group)]
        bounds = [0, *itertools.accumulate(sizes)]
        self.groups = [range(start, end) for start, end in itertools.pairwise(bounds)]

    def added(self, leaf: int, shared: int) -> float:
        """Cost of a leaf whose first `shared` positions are computed already.

        The others are a part without loss (may be empty) and a part with loss.
        """
        _, _, length, first, _ = self.order[leaf]
        cut = min(max(shared, first), length)
        return self._piece(shared, cut, scored=False) + self._piece(cut, length, scored=True)

    def _piece(self, start: int, end: int, *, scored: bool) -> float:
        if start == end:
            return 0.0
        span = Span(start, end - start, end - start, (0,))
        return self.cost.segment(Segment((span,), inner=False, scored=scored))

    def load(self, part: Part) -> float:
        """Cost of a part's trees; two leaves share the least that neighbours between them share."""
        total, before = (self.added(part[0], 0), part[0]) if part else (0.0, 0)
        for leaf in part[1:]:
            between = range(before + 1, leaf + 1)
            total += self.added(leaf, min(self.order[i].shared for i in between))
            before = leaf
        return total


def _depth_first(groups: Sequence[Group], options: TreeOptions) -> Iterator[_Leaf]:
    """Rollouts in the lexicographic order of their tokens, group by group.

    Groups stay in the order given, unless they share trees: then they are in the order of their
    first rollouts.
    """
    keys = [[r.tokens.astype(">u4").tobytes() for r in group.rollouts] for group in groups]
    numbers = [g for g, group in enumerate(groups) if group.rollouts]
    if options.share == "batch":
        numbers.sort(key=lambda g: min(keys[g]))
    before = None
    for g in numbers:
        for r in sorted(range(len(keys[g])), key=keys[g].__getitem__):
            rollout = groups[g].rollouts[r]
            first, shared = pairs_of(rollout).first_trained, 0
            if before is not None and (before[0] == g or options.share == "batch"):
                shared = max(0, common_prefix(before[1].tokens, rollout.tokens) - 1)
                if options.loss_in_leaves:
                    shared = min(shared, first, before[2])
            yield _Leaf(g, r, len(rollout) - 1, first, options.rounded(shared))
            before = g, rollout, first


def parts_of(groups: Sequence[Group], chosen: Iterable[tuple[int, int]]) -> tuple[Group, ...]:
    """The groups with the chosen rollouts only, all in the order in which they were given.

    Args:
        groups: of the step.
        chosen: the number of each rollout's group, and its own number in that.
    """
    parts = []
    for g, members in itertools.groupby(sorted(chosen), key=lambda pair: pair[0]):
        rollouts = tuple(groups[g].rollouts[r] for _, r in members)
        parts.append(replace(groups[g], rollouts=rollouts))
    return tuple(parts)


# Methods ------------------------------------------------------------------------------------------


def _best(leaves: Leaves, num_ranks: int) -> tuple[str, list[Part]]:
    """See "auto" of `place`."""
    tried = []
    for method in ("whole", "greedy", "cut"):
        parts = partition(leaves, num_ranks, method)
        tried.append((max(map(leaves.load, parts), default=0.0), method, parts))
    best = min(tried[:2], key=lambda one: one[0])
    cut = tried[2]
    return (cut if cut[0] < (1 - MIN_GAIN_OF_CUT) * best[0] else best)[1:]


def partition(leaves: Leaves, num_ranks: int, method: str) -> list[Part]:
    """The leaves of every rank that gets any, by one of the methods of `place` but "auto"."""
    if method in ("whole", "cut"):
        single = [range(leaf, leaf + 1) for leaf in range(len(leaves.order))]
        return _ordered(leaves, leaves.groups if method == "whole" else single, num_ranks)
    if method == "equal":
        return _equal(leaves, num_ranks)
    if method == "greedy":
        return _greedy(leaves.groups, list(map(leaves.load, leaves.groups)), num_ranks)
    raw = [float(sum(leaves.order[leaf].length for leaf in unit)) for unit in leaves.groups]
    return _greedy(leaves.groups, raw, num_ranks)


def _ordered(leaves: Leaves, units: Sequence[range], num_ranks: int) -> list[Part]:
    """Consecutive units a rank, with the smallest possible largest load."""
    if not units:
        return []
    alone = [leaves.load(unit) for unit in units]
    # After its neighbour a unit costs less than alone, but only its first leaf does.
    after = [
        cost - leaves.added(unit[0], 0) + leaves.added(unit[0], leaves.order[unit[0]].shared)
        for unit, cost in zip(units, alone, strict=True)
    ]
    low, high = max(alone), max(itertools.accumulate([alone[0], *after[1:]]))
    if len(_filled(alone, after, low, num_ranks)) <= num_ranks:
        high = low
    for _ in range(_STEPS):
        middle = (low + high) / 2
        fits = len(_filled(alone, after, middle, num_ranks)) <= num_ranks
        low, high = (low, middle) if fits else (middle, high)
    starts = _filled(alone, after, high, num_ranks)
    bounds = [*(units[start].start for start in starts), units[-1].stop]
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


def _filled(
    alone: Sequence[float], after: Sequence[float], limit: float, num_ranks: int
) -> list[int]:
    """First unit of every rank if each takes units in order up to `limit`.

    The last units get a rank each if enough ranks are left. More starts than ranks: no fit.
    """
    starts, load = [0], alone[0]
    for unit in range(1, len(alone)):
        if load + after[unit] > limit or len(alone) - unit <= num_ranks - len(starts):
            starts.append(unit)
            load = alone[unit]
        else:
            load += after[unit]
    return starts


def _greedy(units: Sequence[Part], costs: Sequence[float], num_ranks: int) -> list[Part]:
    """Units by falling cost, each to the rank with the least load; ties to the first."""
    loads = [(0.0, rank) for rank in range(num_ranks)]
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    for unit in sorted(range(len(units)), key=lambda number: -costs[number]):
        load, rank = loads[0]
        parts[rank].extend(units[unit])
        heapq.heapreplace(loads, (load + costs[unit], rank))
    return [sorted(part) for part in parts]


def _equal(leaves: Leaves, num_ranks: int) -> list[Part]:
    equal_size(len(leaves.order), num_ranks)
    shared = [
        min((leaves.order[leaf].shared for leaf in leaves.groups[number][1:]), default=0)
        for number, unit in enumerate(leaves.groups)
        for _ in unit
    ]
    names = [leaf.group for leaf in leaves.order]
    costs = [leaves.added(leaf, 0) for leaf in range(len(names))]
    common = [
        cost - leaves.added(n, end) for n, (cost, end) in enumerate(zip(costs, shared, strict=True))
    ]
    return [sorted(part) for part in deal(names, costs, common, num_ranks, equal=True)]


def equal_size(num: int, num_ranks: int) -> int:
    """Rollouts of each rank if `num` rollouts are dealt equally.

    Raises:
        UserError: `num_ranks` does not divide them.
    """
    if num % num_ranks:
        raise UserError(
            f"{num} rollouts on {num_ranks} data-parallel ranks, which meet in every microbatch and"
            f" need equally many; give a multiple of {num_ranks}"
        )
    return num // num_ranks
