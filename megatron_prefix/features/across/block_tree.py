"""The prefix tree of what rollouts on several ranks begin with, made of digests.  Pure: numpy only.

A digest is of a whole beginning up to the end of a block, so it names a place in the tree: equal
digests are one place, and the one before it is its parent. No beginning is compared with another.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class RankBeginnings(NamedTuple):
    """What a rank knows of its beginnings, or tells the others of them: digests, no tokens.

    A beginning is a rollout without its last position, or with `loss_in_leaves` up to its first
    position with loss. Beginnings with equal digests (128 bits of BLAKE2b) count as equal.

    Attributes:
        counts: digests of each beginning: int64 [num].
        digests: of each one's first block, its first two, and so on up to all of it; the others
            hear only some of them (ranges.py): uint64 [sum of counts, 2].
        ends: positions up to the end of each digest's last block, which may be shorter: int64
            [sum of counts].
        first_trained: the first position of each that carries loss in any rollout; at most its
            length: int64 [num].
        own: positions that no digest is of.
        positions: of all beginnings, and of what is behind them in every rollout.
    """

    counts: np.ndarray
    digests: np.ndarray
    ends: np.ndarray
    first_trained: np.ndarray
    own: int
    positions: int

    def beginning(self) -> np.ndarray:
        """Of each digest: int64 [sum of counts]."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def is_first(self) -> np.ndarray:
        """Whether each digest is the first one of its beginning: bool [sum of counts]."""
        return np.diff(self.beginning(), prepend=-1) > 0

    def starts(self) -> np.ndarray:
        """Positions up to the end of the digest before each: int64 [sum of counts]."""
        return np.where(self.is_first(), 0, np.append(0, self.ends)[:-1])


class Places(NamedTuple):
    """Digests by their place in the tree.

    Attributes:
        place: of each digest: int64 [digests].
        order: digests sorted by place, those of one place ascending: int64 [digests].
        bounds: where places begin in `order`, and its length: int64 [places + 1].
        firsts: the first digest of each place: int64 [places].
    """

    place: np.ndarray
    order: np.ndarray
    bounds: np.ndarray
    firsts: np.ndarray


class BlockTree(NamedTuple):
    """What at least two ranks have, cut where beginnings leave one another or end.

    Attributes:
        start, end: positions of each node.
        ranks: that have it, ascending.
        first_trained: the first position that carries loss on any of them.
        children: of each node, and last the roots; in the order of their first beginning.
        below: per rank the last node of each of its beginnings, -1: no other rank shares any of it:
            int64 [num].
    """

    start: list[int]
    end: list[int]
    ranks: list[tuple[int, ...]]
    first_trained: list[int]
    children: list[list[int]]
    below: list[np.ndarray]


def block_tree(ranks: Sequence[RankBeginnings]) -> BlockTree:
    """The tree of what ranks tell of their beginnings, a node for each digest; the same on all."""
    counts, digests, ends, trained = (
        np.concatenate([told[column] for told in ranks]) for column in range(4)
    )
    job = RankBeginnings(counts, digests, ends, trained, 0, 0)
    places = places_of(digests)
    firsts, beginning = places.firsts, job.beginning()
    parent = np.where(job.is_first()[firsts], -1, places.place[firsts - 1])
    children: list[list[int]] = [[] for _ in range(len(firsts) + 1)]
    above = parent.tolist()
    for node in np.argsort(beginning[firsts], kind="stable").tolist():
        children[above[node]].append(node)
    below = np.append(places.place, -1)[np.where(counts > 0, np.cumsum(counts) - 1, -1)]
    nums = [len(told.counts) for told in ranks]
    rank = np.repeat(np.arange(len(ranks)), nums)
    having = beginning[places.order]
    return BlockTree(
        job.starts()[firsts].tolist(), ends[firsts].tolist(),
        _members(rank[having], places, len(ranks)),
        np.minimum.reduceat(trained[having], places.bounds[:-1]).tolist() if len(firsts) else [],
        children, np.split(below, np.cumsum(nums)[:-1]),
    )  # fmt: skip


def _members(rank: np.ndarray, places: Places, num_ranks: int) -> list[tuple[int, ...]]:
    """Per place the ranks that have it. `rank`: of each digest, in the order of places."""
    node = np.repeat(np.arange(len(places.firsts)), np.diff(places.bounds))
    pairs = node * num_ranks + rank  # ascending
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]
    names = (pairs % num_ranks).tolist()
    bounds = np.searchsorted(pairs // num_ranks, np.arange(len(places.firsts) + 1)).tolist()
    return [tuple(names[begin:end]) for begin, end in itertools.pairwise(bounds)]


def places_of(digests: np.ndarray) -> Places:
    """Finds digests that are equal; uint64 [num, 2]."""
    order, differ = _sorted(*np.ascontiguousarray(digests.T))
    begins = np.flatnonzero(np.append(np.ones(min(1, len(order)), bool), differ))
    bounds = np.append(begins, len(order))
    place = np.empty(len(order), np.int64)
    place[order] = np.repeat(np.arange(len(begins)), np.diff(bounds))
    return Places(place, order, bounds, order[begins])


def _sorted(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An order of digests in which equal ones are neighbours, and between neighbours whether they
    differ.

    Args:
        first, second: halves of digests, uint64 [num] each.
    """
    # The low bits are replaced by indices, so one sort gives the order: faster than `argsort`.
    mask = np.uint64((1 << len(first).bit_length()) - 1)
    mixed = np.sort((first & ~mask) | np.arange(len(first), dtype=np.uint64))
    order = (mixed & mask).astype(np.int64)
    bits, first_half, second_half = mixed & ~mask, first[order], second[order]
    differ = (first_half[1:] != first_half[:-1]) | (second_half[1:] != second_half[:-1])
    if (differ & (bits[1:] == bits[:-1])).any():  # different ones have these bits in common
        order = np.lexsort((first, second))
        first_half, second_half = first[order], second[order]
        differ = (first_half[1:] != first_half[:-1]) | (second_half[1:] != second_half[:-1])
    return order, differ
