"""What rollouts share, by their first positions alone.  Pure: numpy only.

A tree reads every position of every rollout. Digests of how rollouts begin, at growing lengths, say
less and cost less: an upper bound of what the tree of a step saves (`most_saved`), and a lower
bound where rollouts are on several ranks (`least_saved`), which need to send no token.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from megatron_prefix.tree.forest import Pairs, TreeOptions, pair_codes

LONGEST_LOOK = 512
"""Rollouts that agree on so many positions may agree on all."""


def digests(rollout: Pairs, lengths: Iterable[int]) -> Iterator[bytes]:
    """Digests of a rollout's first positions, one per length; of all of them if it is shorter.

    Rollouts that agree have equal ones; those that do not differ but for one in 2^64.

    Args:
        rollout: its routes are not looked at.
        lengths: ascending; each is computed when it is asked for.
    """
    digest, start = hashlib.blake2b(digest_size=8), 0
    for length in lengths:
        for column in (rollout.inputs, rollout.labels):
            digest.update(np.ascontiguousarray(column[start:length], np.int64).data)
        yield digest.digest()
        start = length


def most_saved(rollouts: Sequence[Pairs], options: TreeOptions, enough: float = math.inf) -> int:
    """An upper bound of the positions that the tree of a step saves; 0: there is no tree.

    Rollouts are compared at doubling lengths, and one that begins like no other is not looked at
    again. A tree of n rollouts joins them in n - 1 places, and each saves the positions up to
    there. Those that agree on `length` positions but not on twice as many are joined in between. A
    span that saves less than `min_gain` is dissolved, so what is joined there saves what it did
    above.

    Args:
        rollouts: of the step; their routes are not looked at, which can only take sharing away.
        options: of the tree.
        enough: where the bound is as high, it may be a lower one than it would be after a longer
            look, though not below `enough`.
    """
    length = options.boundary
    longest = max(LONGEST_LOOK, length)
    beginnings = _Beginnings(rollouts, longest)
    classes, _, saved = beginnings.split(range(len(rollouts)), 0, length)
    todo = [(members, 0) for members in classes]  # and the bound of spans above
    while todo and saved + sum((len(members) - 1) * above for members, above in todo) < enough:
        is_last, lower = 2 * length > longest, []
        for members, above in todo:
            if is_last:
                sizes = [len(rollouts[member]) for member in members]
                saved += sum(sizes) - max(sizes)
                continue
            end = 2 * length - options.boundary
            if (len(members) - 1) * end < options.min_gain:
                end = above
            parts, num_different, copies = beginnings.split(members, length, 2 * length)
            saved += copies + (num_different - 1) * end
            lower += [(part, end) for part in parts]
        todo, length = lower, 2 * length
    return saved + sum((len(members) - 1) * above for members, above in todo)


class _Beginnings:
    """Input and label of the first positions of rollouts, as bytes.

    Args:
        rollouts: of the step.
        longest: so many positions of each.
    """

    def __init__(self, rollouts: Sequence[Pairs], longest: int) -> None:
        self._sizes = [len(rollout) for rollout in rollouts]
        ends = [min(size, longest) for size in self._sizes]
        self._codes = [codes.tobytes() for codes in pair_codes(rollouts, 0, ends)]

    def split(
        self, members: Sequence[int], start: int, length: int
    ) -> tuple[list[list[int]], int, int]:
        """Those that agree on their first positions.

        Args:
            members: some rollouts, which agree up to `start`.
            start: a position that all of them have.
            length: positions to compare; shorter rollouts agree only with equal ones.

        Returns:
            Classes of two and more; the number of all classes; positions that copies of shorter
            rollouts save.
        """
        by_codes: dict[bytes, list[int]] = {}
        for member in members:
            here = self._codes[member][8 * start : 8 * length]
            by_codes.setdefault(here, []).append(member)
        saved, classes = 0, []
        for alike in by_codes.values():
            if len(alike) > 1 and self._sizes[alike[0]] < length:
                saved += (len(alike) - 1) * self._sizes[alike[0]]
            elif len(alike) > 1:
                classes.append(alike)
        return classes, len(by_codes), saved


def least_saved(rollouts: Sequence[Sequence[bytes]], lengths: Sequence[int]) -> int:
    """A lower bound of the positions that rollouts on one rank need not compute again.

    Args:
        rollouts: the `digests` of each at those of `lengths` that it has.
        lengths: ascending.
    """
    saved, before = 0, 0
    for level, length in enumerate(lengths):
        reach = [rollout[level] for rollout in rollouts if len(rollout) > level]
        if len(reach) < 2:
            break
        saved += (length - before) * (len(reach) - len(set(reach)))
        before = length
    return saved


def least_repeated(
    ranks: Sequence[Sequence[Sequence[bytes]]], lengths: Sequence[int]
) -> tuple[int, list[int]]:
    """Lower bounds of the positions that ranks compute although another one does, too, if each
    computes what its own rollouts begin with once.

    Args:
        ranks: of each the rollouts, of which each has the `digests` at those of `lengths` that it
            has.
        lengths: ascending.

    Returns:
        Those that ranks need not compute, all together, if each is computed once; and per rank
        those that another one has, too.
    """
    repeated, before, common = 0, 0, [0] * len(ranks)
    for level, length in enumerate(lengths):
        seen = [{one[level] for one in rank if len(one) > level} for rank in ranks]
        holders = collections.Counter(itertools.chain(*seen))
        if not holders:
            break
        repeated += (length - before) * (holders.total() - len(holders))
        for number, mine in enumerate(seen):
            common[number] += (length - before) * sum(holders[one] > 1 for one in mine)
        before = length
    return repeated, common
