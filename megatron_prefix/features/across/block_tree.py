"""The prefix tree of what rollouts on several ranks begin with, made of digests.  Pure: numpy only.

A digest is of a whole beginning up to the end of a block, so it names a place in the tree: equal
digests are one place, and the one before it is its parent. No beginning is compared with another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class RankBeginnings(NamedTuple):
    """What a rank broadcasts of its beginnings: digests, no tokens.

    A beginning is a rollout without its last position, or with `loss_in_leaves` up to its first
    position with loss. Beginnings with equal digests (128 bits of BLAKE2b) count as equal.

    Attributes:
        lengths: positions of each beginning, all of them different: int64 [num].
        digests: of each one's first block, its first two, and so on up to all of it: uint64
            [sum of their blocks, 2]. The last block may be shorter.
        first_trained: the first position of each that carries loss in any rollout; at most its
            length: int64 [num].
        own: positions of its rollouts behind them.
        block: positions of a block, a multiple of the trees' boundary.
    """

    lengths: np.ndarray
    digests: np.ndarray
    first_trained: np.ndarray
    own: int
    block: int

    def blocks(self) -> np.ndarray:
        """Digests of each beginning: int64 [num]."""
        return -(-self.lengths // self.block)


class BlockTree(NamedTuple):
    """What at least two ranks have, cut where beginnings leave one another or end.

    Attributes:
        start, end: positions of each node.
        parent: the node that it continues; -1: none.
        ranks: that have it, ascending.
        first_trained: the first position that carries loss on any of them.
        children: of each node, and last the roots; in the order of their first beginning.
        below: per rank the last node of each of its beginnings; -1: no other rank shares any of it.
        local_only: per rank the positions of blocks that no other rank has, each counted once.
    """

    start: list[int]
    end: list[int]
    parent: list[int]
    ranks: list[tuple[int, ...]]
    first_trained: list[int]
    children: list[list[int]]
    below: list[list[int]]
    local_only: list[int]


class _Blocks(NamedTuple):
    """All blocks of all ranks, one after another.

    Attributes:
        beginning: of each block, counted over all ranks: int64 [blocks].
        rank: of each beginning: int64 [beginnings].
        starts, lengths: the first block and the positions of each beginning.
        place: of each block in the tree: int64 [blocks].
        order: blocks sorted by place.
        bounds: where places begin in `order`, and its length.
        shared: whether several ranks have a place: bool [places].
    """

    beginning: np.ndarray
    rank: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    place: np.ndarray
    order: np.ndarray
    bounds: np.ndarray
    shared: np.ndarray


def block_tree(ranks: Sequence[RankBeginnings]) -> BlockTree:
    """The tree of the ranks' beginnings; the same on all ranks."""
    blocks = _blocks(ranks)
    block = ranks[0].block
    # In a beginning shared blocks come before unshared ones.
    shared = blocks.shared[blocks.place]
    reached = np.bincount(blocks.beginning[shared], minlength=len(blocks.rank))
    places, parents = _parents(blocks)
    num = len(blocks.shared)
    children = np.bincount(parents[parents >= 0], minlength=num)
    ending = np.zeros(num, bool)
    is_shared = reached > 0
    lasts = (blocks.starts + reached - 1)[is_shared]
    ending[blocks.place[lasts]] = True
    cut = (children != 1) | ending  # a node ends with the place
    heads = places[np.append(cut, True)[parents]]  # -1 is the last one
    tails = places[cut[places]]
    node_of = _nodes(blocks, shared, heads)
    ended = node_of[blocks.order[blocks.bounds[tails]]]  # nodes in the order of their tails
    tail_of = np.empty(len(heads), np.int64)
    tail_of[ended] = tails
    of_tail = np.full(num + 1, -1)
    of_tail[tails] = ended
    parent = of_tail[parents[np.searchsorted(places, heads)]]
    below = np.full(len(is_shared), -1)
    below[is_shared] = node_of[lasts]
    counts = np.cumsum([len(rank.lengths) for rank in ranks])[:-1]
    start, end = _positions(blocks, heads, tail_of, block)
    members, trained = _members_of(blocks, heads, ranks)
    return BlockTree(
        start, end, parent.tolist(), members, trained,
        _children(blocks, heads, parent), [one.tolist() for one in np.split(below, counts)],
        _alone(blocks, block, len(ranks)),
    )  # fmt: skip


def _blocks(ranks: Sequence[RankBeginnings]) -> _Blocks:
    halves = [
        np.concatenate([beginnings.digests[:, half] for beginnings in ranks]) for half in (0, 1)
    ]
    nums = np.concatenate([beginnings.blocks() for beginnings in ranks])
    rank = np.repeat(np.arange(len(ranks)), [len(beginnings.lengths) for beginnings in ranks])
    beginning = np.repeat(np.arange(len(nums)), nums)
    order, differ = _sorted(*halves)
    begins = np.flatnonzero(np.append(np.ones(min(1, len(order)), bool), differ))
    bounds = np.append(begins, len(order))
    place = np.empty(len(order), np.int64)
    place[order] = np.repeat(np.arange(len(begins)), np.diff(bounds))
    of_block = rank[beginning][order]
    shared = np.zeros(0, bool)
    if len(begins):
        lowest, highest = (of.reduceat(of_block, begins) for of in (np.minimum, np.maximum))
        shared = lowest != highest
    lengths = np.concatenate([beginnings.lengths for beginnings in ranks])
    starts = np.cumsum(nums) - nums
    return _Blocks(beginning, rank, starts, lengths, place, order, bounds, shared)


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


def _alone(blocks: _Blocks, block: int, num_ranks: int) -> list[int]:
    unshared = blocks.order[blocks.bounds[:-1][~blocks.shared]]
    of = blocks.beginning[unshared]
    before = (unshared - blocks.starts[of]) * block
    sizes = np.minimum(block, blocks.lengths[of] - before)
    return np.bincount(blocks.rank[of], sizes, minlength=num_ranks).astype(int).tolist()


def _parents(blocks: _Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Places that several ranks have, ascending, and the one before each; -1: none."""
    places = np.flatnonzero(blocks.shared)
    firsts = blocks.order[blocks.bounds[places]]
    first = firsts == blocks.starts[blocks.beginning[firsts]]
    return places, np.where(first, -1, blocks.place[firsts - 1])


def _nodes(blocks: _Blocks, shared: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """The node of every shared block: that of the last head before it."""
    number = np.full(len(blocks.shared), -1)
    number[heads] = np.arange(len(heads))
    at = np.where(shared & (number[blocks.place] >= 0), np.arange(len(shared)), 0)
    return number[blocks.place[np.maximum.accumulate(at)]]


def _positions(
    blocks: _Blocks, heads: np.ndarray, tails: np.ndarray, block: int
) -> tuple[list[int], list[int]]:
    """Where nodes begin and end; the last block of a beginning may be shorter."""
    first, last = (blocks.order[blocks.bounds[places]] for places in (heads, tails))
    starts = (first - blocks.starts[blocks.beginning[first]]) * block
    ends = (last + 1 - blocks.starts[blocks.beginning[last]]) * block
    return starts.tolist(), np.minimum(ends, blocks.lengths[blocks.beginning[last]]).tolist()


def _members_of(
    blocks: _Blocks, heads: np.ndarray, ranks: Sequence[RankBeginnings]
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Per node the ranks that have it, and the first position with loss."""
    if not len(heads):
        return [], []
    counts = blocks.bounds[heads + 1] - blocks.bounds[heads]
    begins = np.cumsum(counts) - counts
    rows = np.arange(counts.sum()) - np.repeat(begins - blocks.bounds[heads], counts)
    members = blocks.beginning[blocks.order[rows]]
    trained = np.concatenate([beginnings.first_trained for beginnings in ranks])
    pairs = np.unique(np.repeat(np.arange(len(heads)), counts) * len(ranks) + blocks.rank[members])
    names = (pairs % len(ranks)).tolist()
    ends = np.cumsum(np.bincount(pairs // len(ranks), minlength=len(heads))).tolist()
    return (
        [tuple(names[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)],
        np.minimum.reduceat(trained[members], begins).tolist(),
    )


def _children(blocks: _Blocks, heads: np.ndarray, parent: np.ndarray) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in range(len(heads) + 1)]
    if len(heads):
        of = blocks.beginning[blocks.order]
        earliest = np.minimum.reduceat(of, blocks.bounds[:-1])[heads]
        above = parent.tolist()
        for node in np.argsort(earliest, kind="stable").tolist():
            children[above[node]].append(node)
    return children
