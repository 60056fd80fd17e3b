"""Blocks: every query sees its ancestors' keys, each once, in as few blocks as there are chains."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from megatron_prefix.tree import Forest, Pairs, Segment, Span, TreeOptions, build
from megatron_prefix.tree.kv_layout import Block, BufferMap, buffer_map
from tests.harness.trees import flat_rollouts, rollout_sets, tree_options


def keys_of(forest: Forest, index: int, parts: int) -> list[tuple[int, int]]:
    """Names of one rank's keys of a segment."""
    return [(index, row) for row in range(forest.segments[index].padded_length // parts)]


def filled(forest: Forest, found: BufferMap, parts: int) -> dict[int, list[tuple[int, int]]]:
    """Every chain's buffer with the names of the keys that lie in it; nothing lies on another."""
    buffers: dict[int, list] = {head: [None] * rows for head, rows in found.length.items()}
    for index, segment in enumerate(forest.segments):
        if segment.inner:
            keys = keys_of(forest, index, parts)
            span = slice(found.offset[index], found.offset[index] + len(keys))
            buffer = buffers[found.head[index]]
            assert buffer[span] == [None] * len(keys)
            buffer[span] = keys
    assert not any(key is None for buffer in buffers.values() for key in buffer)
    return buffers


@pytest.mark.parametrize("parts", [1, 2])
@given(sets=rollout_sets(), options=tree_options())
def test_every_ancestor_is_seen_once(
    parts: int, sets: tuple[list[Pairs], list[int]], options: TreeOptions
) -> None:
    if options.align % parts:
        return
    forest = build(*sets, options)
    found = buffer_map(forest.segments, parts)
    buffers = filled(forest, found, parts)
    for index in range(len(forest.segments)):
        above = forest.ancestors(index)
        seen = [key for head, stop in found.blocks[index] for key in buffers[head][:stop]]
        assert seen == [key for ancestor in above for key in keys_of(forest, ancestor, parts)]
        assert len(found.blocks[index]) == sum(not forest.segments[a].extends for a in above)


def test_chunks_of_a_chain_are_one_block() -> None:
    rollouts, groups = flat_rollouts(prefix=10, suffix=4, num=2, num_groups=2)
    forest = build(rollouts, groups, TreeOptions(min_gain=0, chunk_tokens=4))
    found = buffer_map(forest.segments)
    # Per group three chunks of 3, 3 and 4 positions, and a wave.
    assert found.head == (0, 0, 0, 3, 4, 4, 4, 7)
    assert found.offset == (0, 3, 6, 0) * 2
    assert found.length == {0: 10, 4: 10}
    assert found.blocks[:4] == ((), (Block(0, 3),), (Block(0, 6),), (Block(0, 10),))


def test_a_branch_sees_the_part_of_a_chain_above_it() -> None:
    def segment(parent: int, length: int, *, inner: bool, extends: bool = False) -> Segment:
        return Segment(parent, 0, (Span(0, length, length, (0,)),), inner, extends, not inner)

    chain = [segment(-1, 4, inner=True), segment(0, 2, inner=True, extends=True)]
    below = [segment(1, 3, inner=True), segment(2, 1, inner=False), segment(1, 1, inner=False)]
    found = buffer_map([*chain, *below])
    assert found.blocks[3] == (Block(0, 6), Block(2, 3))
    assert found.blocks[4] == (Block(0, 6),)
    assert found.length == {0: 6, 2: 3}


def test_nothing_shared_needs_no_buffer() -> None:
    forest = build([Pairs(np.arange(5), np.arange(5), np.ones(5, bool))])
    assert buffer_map(forest.segments) == BufferMap((0,), (0,), {}, ((),))
