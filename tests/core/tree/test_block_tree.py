"""The tree of what ranks tell of their beginnings, against one that is made place by place."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from megatron_prefix.features.across.block_tree import BlockTree, RankBeginnings, block_tree
from megatron_prefix.features.across.common import beginnings_of, common_spans
from megatron_prefix.tree import Pairs, TreeOptions

BLOCKS = 2
"""Positions of a block."""


def drawn(seed: int) -> list[RankBeginnings]:
    """Ranks with rollouts that leave one another anywhere; one may have none."""
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(0, 3, draw.integers(1, 12)) for _ in range(4)]
    told = []
    for _ in range(draw.integers(1, 5)):
        rollouts = []
        for _ in range(draw.integers(0, 6)):
            prompt = prompts[draw.integers(len(prompts))]
            ids = np.r_[prompt[: draw.integers(1, len(prompt) + 1)], draw.integers(0, 3, 3)]
            trained = np.arange(len(ids) - 1) >= draw.integers(0, len(ids))
            rollouts.append(Pairs(ids[:-1], ids[1:], trained))
        one, _ = beginnings_of(rollouts, TreeOptions(), BLOCKS)
        told.append(one)
    return told


def naive(told: list[RankBeginnings]) -> tuple[dict[bytes, tuple], list[int]]:
    """By what each node ends with: where it begins and ends, its parent's end, its ranks, and
    the first trained position; and what each rank has alone."""
    having: dict[bytes, list[tuple[int, int]]] = {}
    paths: dict[tuple[int, int], list[bytes]] = {}
    for rank, one in enumerate(told):
        digests = iter([digest.tobytes() for digest in one.digests])
        for number, num in enumerate(one.blocks().tolist()):
            paths[rank, number] = [*itertools.islice(digests, num)]
            for digest in paths[rank, number]:
                having.setdefault(digest, []).append((rank, number))
    alone = [0] * len(told)
    for digest, members in having.items():
        if len({rank for rank, _ in members}) == 1:
            rank, number = members[0]
            place = paths[rank, number].index(digest) * BLOCKS
            alone[rank] += min(BLOCKS, int(told[rank].lengths[number]) - place)
    shared = {d: of for d, of in having.items() if len({rank for rank, _ in of}) > 1}
    ways = {key: [d for d in path if d in shared] for key, path in paths.items()}
    # A node goes on while all that came here go on together.
    nodes: dict[bytes, tuple] = {}
    for (rank, number), way in ways.items():
        start, parent = 0, b""
        for place, digest in enumerate(way):
            after = {tuple(ways[key][place + 1 : place + 2]) for key in shared[digest]}
            if len(after) == 1 and after != {()}:
                continue
            end = min((place + 1) * BLOCKS, int(told[rank].lengths[number]))
            of = [(told[r], n) for r, n in shared[digest]]
            nodes[digest] = (
                start, end, parent, tuple(sorted({r for r, _ in shared[digest]})),
                min(int(one.first_trained[n]) for one, n in of),
            )  # fmt: skip
            start, parent = end, digest
    return nodes, alone


def named(tree: BlockTree, told: list[RankBeginnings]) -> dict[bytes, tuple]:
    """The same of a tree, by a beginning that ends or branches there."""
    last: dict[int, bytes] = {-1: b""}
    for one, below in zip(told, tree.below, strict=True):
        starts = np.cumsum(one.blocks()) - one.blocks()
        for start, node in zip(starts.tolist(), below, strict=True):
            while node >= 0:
                place = -(-tree.end[node] // BLOCKS) - 1
                last[node] = one.digests[start + place].tobytes()
                node = tree.parent[node]
    columns = (tree.start, tree.end, tree.parent, tree.ranks, tree.first_trained)
    rows = zip(*columns, strict=True)
    return {
        last[node]: (start, end, last[parent], *others)
        for node, (start, end, parent, *others) in enumerate(rows)
    }


@pytest.mark.parametrize("seed", range(40))
def test_nodes_are_where_beginnings_leave_one_another(seed: int) -> None:
    told = drawn(seed)
    tree = block_tree(told)
    nodes, alone = naive(told)
    assert named(tree, told) == nodes
    assert tree.local_only == alone
    assert sorted(itertools.chain(*tree.children)) == [*range(len(nodes))]
    for node, children in enumerate(tree.children[:-1]):
        assert all(tree.parent[child] == node for child in children)


def test_digests_that_agree_in_half_of_their_bits_are_different() -> None:
    found = [drawn(seed) for seed in range(20)]
    for told in found:
        half = [one._replace(digests=one.digests * np.array([0, 1], np.uint64)) for one in told]
        for rank in range(len(told)):
            ours, wanted = (
                common_spans(some, rank, TreeOptions(min_gain=0)) for some in (half, told)
            )
            assert ours == wanted
    assert any(common_spans(told, 0, TreeOptions(min_gain=0)).spans for told in found)
