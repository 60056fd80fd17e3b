"""Context parallelism: the sidecar of which every rank holds a part, and what ranks send for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_prefix.numerics import assert_close
from megatron_prefix.sidecar.cache import SegmentState
from megatron_prefix.sidecar.context_parallel import ShardedCache
from megatron_prefix.tree import cp_layout
from megatron_prefix.tree.kv_layout import Block
from tests.harness.played_ranks import PlayedRank, World, forest, play, random

NUM_LAYERS = 2


def filled(rank: PlayedRank, reduce: str, dtype: torch.dtype = torch.float64) -> ShardedCache:
    """A rank's sidecar with the K/V of the prompt; position p has the key p in layer 0."""
    tree = forest()
    assert [segment.inner for segment in tree.segments] == [True, True, False, False]
    cache = ShardedCache(tree.segments, NUM_LAYERS, rank, reduce)
    for layer in range(NUM_LAYERS):
        for index in (0, 1):
            held = torch.from_numpy(cp_layout.positions(8, rank.rank, 2) + 8 * index)
            key = (100.0 * layer + held).to(dtype).view(-1, 1, 1).expand(-1, 2, 3)
            cache.capture(layer, index, key, -key[..., :2])
    return cache


PROMPT = Block(0, 8)
"""What a wave reads: both chunks' rows of this rank."""
ROW_BYTES = (3 + 2) * 2 * 8  # dims * heads * bytes
both_ways = pytest.mark.parametrize("reduce", ["wave", "segment"])


def test_a_rank_holds_its_own_rows_only() -> None:
    cache = filled(PlayedRank(World(2), 0), "wave")
    assert cache.num_bytes == NUM_LAYERS * 8 * ROW_BYTES
    assert cache.map.blocks[2] == cache.map.blocks[3] == (PROMPT,)


def test_reads_are_gathered_ahead_once_and_released() -> None:
    def part(rank: PlayedRank) -> None:
        cache = filled(rank, "wave")
        kept = cache.num_bytes
        for layer in (-1, 0, 1, NUM_LAYERS):  # beyond the ends nothing happens
            cache.prefetch(layer, 2)
        assert len(rank.sent) == NUM_LAYERS
        for layer in range(NUM_LAYERS):
            for _ in range(2):
                key, value = cache.read(layer, PROMPT)
                assert sorted(key[:, 0, 0].tolist()) == [100 * layer + p for p in range(16)]
                assert torch.equal(value, -key[..., :2])
        assert len(rank.sent) == NUM_LAYERS
        assert cache.num_bytes == kept + NUM_LAYERS * 16 * ROW_BYTES
        cache.release(0)
        assert cache.num_bytes == kept + 16 * ROW_BYTES
        cache.read(0, PROMPT)
        assert len(rank.sent) == NUM_LAYERS + 1, "what was released is gathered again"

    play(2, part)


@both_ways
def test_gradients_reach_the_owners_of_the_keys(reduce: str) -> None:
    held = [
        np.concatenate([cp_layout.positions(8, rank, 2) + c for c in (0, 8)]) for rank in (0, 1)
    ]
    parts = [[random(16, 2, 5, seed=10 * wave + rank) for wave in (0, 1)] for rank in (0, 1)]
    total = torch.zeros(16, 2, 5, dtype=torch.float64)
    total[np.concatenate(held)] = sum(parts[0] + parts[1])

    def part(rank: PlayedRank) -> None:
        cache = filled(rank, reduce)
        for wave in parts[rank.rank]:
            cache.add_gradient(0, PROMPT, wave[..., :3], wave[..., 3:])
        for index in (1, 0):
            taken = cache.take_gradient(0, index)
            assert taken is not None and cache.state(0, index) is SegmentState.CONSUMED
            mine = total[8 * index + cp_layout.positions(8, rank.rank, 2)]
            assert_close(torch.cat(taken, -1), mine, 4)
        # Two waves of the whole chain, or the two chunks once each.
        rows = {"wave": [16, 16], "segment": [8, 8]}[reduce]
        assert [given.shape for (given,) in rank.sent] == [(n, 2, 5) for n in rows]

    play(2, part)


@both_ways
def test_gradients_of_16_bit_keys_are_added_up_in_32(reduce: str) -> None:
    """1 and 1/1024 from each rank and wave: their sums need more than the 8 bits of bfloat16."""
    wanted = torch.full((8, 2, 5), 2 + 2 / 1024)

    def part(rank: PlayedRank) -> None:
        cache = filled(rank, reduce, torch.bfloat16)
        for size in (1.0, 1 / 1024):
            wave = torch.full((16, 2, 5), size, dtype=torch.bfloat16)
            cache.add_gradient(0, PROMPT, wave[..., :3], wave[..., 3:])
        taken = [cache.take_gradient(0, index) for index in (1, 0)]
        assert {given.dtype for (given,) in rank.sent} == {torch.float32}
        found = torch.cat([torch.cat(both, -1) for both in taken if both is not None])
        assert torch.equal(found, wanted)

    play(2, part)


@both_ways
def test_a_chunk_adds_to_the_chunks_above_it(reduce: str) -> None:
    """The second chunk reads only a part of what waves read of the chain."""

    def part(rank: PlayedRank) -> None:
        cache = filled(rank, reduce)
        (above,) = cache.map.blocks[1]
        assert above == Block(0, 4)
        ones = torch.ones(16, 2, 5, dtype=torch.float64)
        cache.add_gradient(0, PROMPT, ones[..., :3], ones[..., 3:])
        cache.add_gradient(0, above, ones[:8, :, :3], ones[:8, :, 3:])
        for index, factor in ((1, 2), (0, 4)):  # ranks, and blocks that cover the chunk
            taken = cache.take_gradient(0, index)
            assert taken is not None
            assert torch.equal(torch.cat(taken, -1), factor * ones[:4])

    play(2, part)


@both_ways
def test_where_nothing_was_sent_nothing_comes(reduce: str) -> None:
    cache = filled(PlayedRank(World(2), 0), reduce)
    assert cache.take_gradient(1, 1) is None


@both_ways
def test_a_failed_step_leaves_nothing_behind(reduce: str) -> None:
    cache = filled(PlayedRank(World(2), 0), reduce)
    cache.prefetch(0, 2)  # the other rank does not come any more
    cache.add_gradient(1, PROMPT, random(16, 2, 3), random(16, 2, 2))
    cache.clear()
    assert cache.num_bytes == 0
    with pytest.raises(RuntimeError, match="0 are there: before their forward"):
        cache.read(0, PROMPT)
    with pytest.raises(RuntimeError, match="after their backward"):
        cache.add_gradient(0, PROMPT, random(16, 2, 3), random(16, 2, 2))


@both_ways
def test_segments_are_freed_with_their_sums(reduce: str) -> None:
    def part(rank: PlayedRank) -> int:
        cache = filled(rank, reduce)
        for layer in range(NUM_LAYERS):
            cache.add_gradient(layer, PROMPT, random(16, 2, 3), random(16, 2, 2))
        for index in (1, 0):
            for layer in range(NUM_LAYERS):
                cache.take_gradient(layer, index)
            cache.free(index, consumed=True)
        return cache.num_bytes

    assert play(2, part) == [0, 0]
