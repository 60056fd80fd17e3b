"""Context parallelism: the sidecar of which every rank holds a part, and what ranks send for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_prefix.features.across import carried
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.sidecar.cache import SegmentState, SidecarCache
from megatron_prefix.tree import cp_layout
from megatron_prefix.tree.payload_map import Form, Run, payload_map
from tests.harness import sidecar
from tests.harness.played_ranks import PlayedRank, World, forest, play, random, spread

NUM_LAYERS = 2


def filled(rank: PlayedRank, reduce: str, dtype: torch.dtype = torch.float64) -> SidecarCache:
    """A rank's sidecar with the K/V of the prompt; position p has the key p in layer 0."""
    tree = forest()
    assert [segment.inner for segment in tree.segments] == [True, True, False, False]
    cache = spread(reduce, partial(payload_map, tree.segments, None, 2), NUM_LAYERS, rank)
    for layer in range(NUM_LAYERS):
        for index in (0, 1):
            held = torch.from_numpy(cp_layout.rank_positions(8, rank.rank, 2) + 8 * index)
            key = (100.0 * layer + held).to(dtype).view(-1, 1, 1).expand(-1, 2, 3)
            cache.capture(layer, index, (key, -key[..., :2]))
    rank.sent.clear()
    return cache


WAVE, CHUNK = 2, 1
"""A wave reads both chunks, 16 positions, the second chunk the first one's 8."""
ROW_BYTES = (3 + 2) * 2 * 8  # dims * heads * bytes
both_ways = pytest.mark.parametrize("reduce", ["wave", "segment"])


@both_ways
def test_a_rank_holds_its_own_rows_or_all(reduce: str) -> None:
    rows = {"wave": 4, "segment": 8}[reduce]  # of each chunk

    def part(rank: PlayedRank) -> None:
        cache = filled(rank, reduce)
        assert cache.device_bytes.held == NUM_LAYERS * 2 * rows * ROW_BYTES
        wave, other = cache.map.levels[2], cache.map.levels[3]
        assert [level.runs for level in wave] == [(Run(0, 8, 0, 2 * rows),)]
        assert wave == other
        assert [level.runs for level in cache.map.levels[CHUNK]] == [(Run(0, 4, 0, rows),)]

    play(2, part)


def test_what_every_rank_keeps_is_ordered_and_read_locally() -> None:
    def part(rank: PlayedRank) -> None:
        cache = filled(rank, "segment")
        for layer in range(NUM_LAYERS):
            key, value = cache.read(layer, WAVE, cache.level(WAVE, 0))
            assert key[:, 0, 0].tolist() == [100 * layer + p for p in range(16)]
            assert torch.equal(value, -key[..., :2])
            key, _ = cache.own(layer, CHUNK)
            assert key[:, 0, 0].tolist() == [100 * layer + p for p in range(8, 16)]
        assert not rank.sent

    play(2, part)


def test_what_comes_for_an_inner_segment_is_gathered_once() -> None:
    """Attention starts the exchange, and `capture` ends it; when it runs again, nothing crosses."""
    tree = forest()

    def part(rank: PlayedRank) -> None:
        cache = spread("segment", partial(payload_map, tree.segments, None, 2), NUM_LAYERS, rank)
        held = torch.from_numpy(cp_layout.rank_positions(8, rank.rank, 2)).double()
        key = held.view(-1, 1, 1).expand(-1, 2, 3)
        for _ in range(2):
            own = cache.own_keys(0, 0, True, (key, -key[..., :2]))
            assert len(rank.sent) == 1
            seen, values = own.runs()
            runs = cp_layout.own_runs((8,), rank.rank, 2)
            assert seen[:, 0, 0].tolist() == runs.visible.tolist()
            assert torch.equal(values, -seen[..., :2])
            assert len(rank.sent) == 1 and cache.state(0, 0) is SegmentState.CAPTURED

    play(2, part)


def test_reads_are_gathered_ahead_once_and_released() -> None:
    def part(rank: PlayedRank) -> None:
        cache = filled(rank, "wave")
        for layer in (-1, 0, 1, NUM_LAYERS):  # beyond the ends nothing happens
            cache.prefetch(layer, 2)
        assert len(rank.sent) == NUM_LAYERS
        for layer in range(NUM_LAYERS):
            for _ in range(2):
                key, value = cache.read(layer, WAVE, cache.level(WAVE, 0))
                assert sorted(key[:, 0, 0].tolist()) == [100 * layer + p for p in range(16)]
                assert torch.equal(value, -key[..., :2])
        assert len(rank.sent) == NUM_LAYERS
        del key, value
        views = [cache.read(layer, WAVE, cache.level(WAVE, 0)) for layer in range(NUM_LAYERS)]
        memory = [StorageWeakRef(key.untyped_storage()) for key, _ in views]
        views.clear()
        cache.release(0)
        assert [one.expired() for one in memory] == [True, False]
        cache.read(0, WAVE, cache.level(WAVE, 0))
        assert len(rank.sent) == NUM_LAYERS + 1, "what was released is gathered again"

    play(2, part)


@both_ways
def test_gradients_reach_the_owners_of_the_keys(reduce: str) -> None:
    held = [
        np.concatenate([cp_layout.rank_positions(8, rank, 2) + c for c in (0, 8)])
        for rank in (0, 1)
    ]
    parts = [[random(16, 2, 5, seed=10 * wave + rank) for wave in (0, 1)] for rank in (0, 1)]
    total = torch.zeros(16, 2, 5, dtype=torch.float64)
    # Rows as `read` has them: the ranks' end to end, or in the order of positions.
    rows = np.concatenate(held) if reduce == "wave" else np.arange(16)
    total[rows] = sum(parts[0] + parts[1])

    def part(rank: PlayedRank) -> None:
        cache = filled(rank, reduce)
        for wave in parts[rank.rank]:
            cache.add(0, WAVE, cache.level(WAVE, 0), (wave[..., :3], wave[..., 3:]))
        for index in (1, 0):
            taken = cache.take(0, index)
            assert taken is not None and cache.state(0, index) is SegmentState.CONSUMED
            mine = total[8 * index + cp_layout.rank_positions(8, rank.rank, 2)]
            assert_close(torch.cat(taken, -1), mine, 4)
        # Two waves of the whole chain, or the two chunks once each.
        lengths = {"wave": [16, 16], "segment": [8, 8]}[reduce]
        assert [given.shape for (given,) in rank.sent] == [(n, 2, 5) for n in lengths]

    play(2, part)


@both_ways
def test_gradients_of_16_bit_keys_are_added_up_in_32(reduce: str) -> None:
    """1 and 1/1024 from each rank and wave: their sums need more than the 8 bits of bfloat16."""
    wanted = torch.full((8, 2, 5), 2 + 2 / 1024)

    def part(rank: PlayedRank) -> None:
        cache = filled(rank, reduce, torch.bfloat16)
        for size in (1.0, 1 / 1024):
            wave = torch.full((16, 2, 5), size, dtype=torch.bfloat16)
            cache.add(0, WAVE, cache.level(WAVE, 0), (wave[..., :3], wave[..., 3:]))
        taken = [cache.take(0, index) for index in (1, 0)]
        assert {given.dtype for (given,) in rank.sent} == {torch.float32}
        found = torch.cat([torch.cat(both, -1) for both in taken if both is not None])
        assert torch.equal(found, wanted)

    play(2, part)


@both_ways
def test_a_chunk_adds_to_the_chunks_above_it(reduce: str) -> None:
    """The second chunk reads only a part of what waves read of the chain."""

    def part(rank: PlayedRank) -> None:
        cache = filled(rank, reduce)
        ones = torch.ones(16, 2, 5, dtype=torch.float64)
        cache.add(0, WAVE, cache.level(WAVE, 0), (ones[..., :3], ones[..., 3:]))
        cache.add(0, CHUNK, cache.level(CHUNK, 0), (ones[:8, :, :3], ones[:8, :, 3:]))
        for index, factor in ((1, 2), (0, 4)):  # ranks, and blocks that cover the chunk
            taken = cache.take(0, index)
            assert taken is not None
            assert torch.equal(torch.cat(taken, -1), factor * ones[:4])

    play(2, part)


@both_ways
def test_where_nothing_was_sent_nothing_comes(reduce: str) -> None:
    assert play(2, lambda rank: filled(rank, reduce).take(1, 1)) == [None, None]


@both_ways
def test_a_failed_step_leaves_nothing_behind(reduce: str) -> None:
    def part(rank: PlayedRank) -> None:
        cache = filled(rank, reduce)
        if rank.rank:  # the other rank is alone from here on
            return
        cache.prefetch(0, 2)
        cache.own_keys(0, WAVE, False, (random(8, 2, 3), random(8, 2, 2)))
        cache.add(1, WAVE, cache.level(WAVE, 0), (random(16, 2, 3), random(16, 2, 2)))
        cache.clear()
        assert cache.device_bytes.held == 0
        with pytest.raises(RuntimeError, match="segment 2 reads segment 0, which is empty: before"):
            cache.read(0, WAVE, cache.level(WAVE, 0))
        with pytest.raises(RuntimeError, match="after its backward"):
            cache.add(0, WAVE, cache.level(WAVE, 0), (random(16, 2, 3), random(16, 2, 2)))

    play(2, part)


def test_a_step_that_fails_in_an_exchange_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank, begun = PlayedRank(World(2), 0), []

    def gather(*parts: torch.Tensor) -> Any:
        later = PlayedRank.gather(rank, *parts)
        begun.append(weakref.ref(later))
        return later

    monkeypatch.setattr(rank, "gather", gather)
    cache = spread("segment", partial(payload_map, forest().segments, None, 2), 1, rank)
    cache.own_keys(0, 0, True, (random(4, 2, 3), random(4, 2, 2)))
    (coming,) = begun
    assert coming() is not None
    cache.clear()
    assert coming() is None and cache.device_bytes.held == 0


@both_ways
def test_other_ranks_get_and_send_the_part_of_a_rank(reduce: str) -> None:
    """Nothing crosses between context-parallel ranks for it; what came back is in the sums."""
    more = [
        tuple(random(4, 2, width, seed=9 * rank + width) for width in (3, 2)) for rank in (0, 1)
    ]

    def part(rank: PlayedRank) -> None:
        cache = filled(rank, reduce)
        held = torch.from_numpy(cp_layout.rank_positions(8, rank.rank, 2) + 8).double()
        for layer, (key, value) in enumerate(carried.leaving(cache, CHUNK, [0])):
            assert torch.equal(key[:, 0, 0], 100 * layer + held)
            assert torch.equal(value, -key[..., :2])
        carried.add_to(cache, CHUNK, [0], [more[rank.rank]] * NUM_LAYERS)
        assert not rank.sent
        for sums in carried.sums(cache, CHUNK):
            for found, wanted in zip(sums, more[rank.rank], strict=True):
                assert_close(found, wanted, 2)

    play(2, part)


def test_a_segment_is_captured_once_in_a_layer() -> None:
    def part(rank: PlayedRank) -> None:
        cache = filled(rank, "segment")
        cache.take(0, CHUNK)
        with pytest.raises(RuntimeError, match="segment 1: consumed, expected empty"):
            cache.capture(0, CHUNK, (random(4, 2, 3), random(4, 2, 2)))

    play(2, part)


@both_ways
def test_gradients_of_own_keys_are_added_up_in_32_bits(reduce: str) -> None:
    """1 from the late run and 1/1024 from the early one, of each rank: more than bfloat16 holds."""
    tree = forest()

    def part(rank: PlayedRank) -> None:
        cache = spread(reduce, partial(payload_map, tree.segments, None, 2), 1, rank)
        lengths = cache.map.lengths[WAVE]
        key = random(sum(lengths) // 2, 2, 3).bfloat16()
        own = cache.own_keys(0, WAVE, False, (key, key))
        keys = cp_layout.own_runs(lengths, rank.rank, 2).keys
        values = torch.tensor([(1 / 1024, 1.0)[number % 2] for number in range(len(keys))])
        sent = values.repeat_interleave(torch.tensor(keys)).bfloat16()
        own.send((sent.view(-1, 1, 1).expand(-1, 2, 3),) * 2)
        wanted = torch.zeros(sum(lengths))
        for other in (0, 1):
            runs = cp_layout.own_runs(lengths, other, 2)
            for number, seen in enumerate(np.split(runs.visible, np.cumsum(runs.keys)[:-1])):
                wanted[torch.from_numpy(seen)] += (1 / 1024, 1.0)[number % 2]
        mine = torch.from_numpy(cp_layout.held_positions(lengths, rank.rank, 2))
        for found in own.take():
            assert found.dtype is torch.float32
            assert torch.equal(found[:, 0, 0], wanted[mine])

    play(2, part)


@both_ways
def test_segments_are_freed_with_their_sums(reduce: str) -> None:
    def part(rank: PlayedRank) -> int:
        cache = filled(rank, reduce)
        for layer in range(NUM_LAYERS):
            cache.add(layer, WAVE, cache.level(WAVE, 0), (random(16, 2, 3), random(16, 2, 2)))
        for index in (1, 0):
            for layer in range(NUM_LAYERS):
                cache.take(layer, index)
            cache.free(index, consumed=True)
        return cache.device_bytes.held

    assert play(2, part) == [0, 0]


# Segments of several trees ------------------------------------------------------------------------


def packed(rank: PlayedRank, reduce: str) -> tuple[sidecar.Step, SidecarCache]:
    """A rank's sidecar with three inner segments; the key of a position is its number in all."""
    made = sidecar.packed(4)
    cache = spread(reduce, partial(made.planned, 2), 1, rank)
    for index in (0, 1, 2):
        held = cp_layout.held_positions(lengths_of(made, index), rank.rank, 2)
        key = (1000.0 * index + torch.from_numpy(held).double()).view(-1, 1, 1).expand(-1, 2, 3)
        cache.capture(0, index, (key, -key[..., :2]))
    rank.sent.clear()
    return made, cache


def lengths_of(made: sidecar.Step, index: int) -> list[int]:
    return [span.padded for span in made.segments[index].spans]


def keys_of(made: sidecar.Step, index: int, number: int) -> list[float]:
    """The keys of a span, as `packed` numbers them."""
    start = sum(lengths_of(made, index)[:number])
    return [1000.0 * index + start + i for i in range(lengths_of(made, index)[number])]


# (segment, level): the spans (segment, number) that its runs see.
RUNS = {
    (1, 0): [(0, 0), (0, 1)],
    (3, 0): [(0, 0), (0, 1), (2, 0)],
    (3, 1): [(1, 0), (1, 1), (1, 2)],
    (4, 0): [(0, 1), (0, 0)],
    (4, 1): [(1, 0)],
}


@both_ways
def test_keys_are_read_run_by_run(reduce: str) -> None:
    def part(rank: PlayedRank) -> None:
        made, cache = packed(rank, reduce)
        for (index, number), spans in RUNS.items():
            for _ in range(2):  # gathered and put in order once
                key, value = cache.read(0, index, cache.level(index, number))
                assert torch.equal(value, -key[..., :2])
                lengths = cache.level(index, number).key_lengths
                runs = key[:, 0, 0].split(lengths)
                assert [sorted(run.tolist()) for run in runs] == [keys_of(made, *s) for s in spans]
        assert len(rank.sent) == (len(RUNS) if reduce == "wave" else 0)

    play(2, part)


@both_ways
def test_gradients_of_runs_reach_the_owners_of_their_keys(reduce: str) -> None:
    """Each rank sends the key itself, times a factor of the rank and the reader."""
    factors = {key: 1 + number for number, key in enumerate(RUNS)}

    def part(rank: PlayedRank) -> None:
        made, cache = packed(rank, reduce)
        for (index, number), factor in factors.items():
            key, value = cache.read(0, index, cache.level(index, number))
            scale = factor * (1 + 10 * rank.rank)
            cache.add(0, index, cache.level(index, number), (scale * key, 2 * scale * value))
        for index in (2, 1, 0):
            taken = cache.take(0, index)
            assert taken is not None
            held = cp_layout.held_positions(lengths_of(made, index), rank.rank, 2)
            keys = torch.tensor([k for n in range(3) for k in keys_or_none(made, index, n)])
            times = torch.tensor(
                [
                    sum(f for key, f in factors.items() if (index, n) in RUNS[key]) * (1 + 11)
                    for n in range(3)
                    for _ in keys_or_none(made, index, n)
                ]
            )
            wanted = (keys * times).double()[torch.from_numpy(held)]
            assert torch.equal(taken[0], wanted.view(-1, 1, 1).expand(-1, 2, 3))
            assert torch.equal(taken[1], -2 * wanted.view(-1, 1, 1).expand(-1, 2, 2))

    play(2, part)


def keys_or_none(made: sidecar.Step, index: int, number: int) -> list[float]:
    return keys_of(made, index, number) if number < len(lengths_of(made, index)) else []


@both_ways
@pytest.mark.parametrize("name", sidecar.STEPS)
def test_a_step_on_two_ranks_takes_what_one_rank_takes(name: str, reduce: str) -> None:
    """Rows that are used again, and gradients under way when their segment is taken."""
    made = sidecar.STEPS[name](4)
    order = [(action[0] == "B", int(action[1:])) for action in made.order]

    def run(cache: SidecarCache, of: Callable[[int], torch.Tensor]) -> dict[int, torch.Tensor]:
        found = {}
        for backward, index in order:
            one = made.segments[index]
            if one.inner and not backward:
                key = of(index)
                cache.capture(0, index, (key[..., :3], key[..., 3:]))
            cache.prefetch(0, index, backward=backward)
            for number in range(len(cache.map.levels[index]) if backward else 0):
                key, value = cache.read(0, index, cache.level(index, number))
                cache.add(0, index, cache.level(index, number), ((1 + index) * key, value))
            if one.inner and backward:
                taken = cache.take(0, index)
                assert taken is not None
                found[index] = torch.cat(taken, -1).clone()
                cache.free(index, consumed=True)
            cache.release(0)
        assert cache.device_bytes.held == 0
        return found

    wholes = {i: random(s.padded_length, 2, 5, seed=i) for i, s in enumerate(made.segments)}
    expected = run(SidecarCache(made.planned(), [Form.POSITIONS] * 1), wholes.__getitem__)

    def part(rank: PlayedRank) -> None:
        def mine(index: int) -> torch.Tensor:
            held = cp_layout.held_positions(lengths_of(made, index), rank.rank, 2)
            return wholes[index][torch.from_numpy(held)]

        found = run(spread(reduce, partial(made.planned, 2), 1, rank), mine)
        for index, whole in expected.items():
            held = cp_layout.held_positions(lengths_of(made, index), rank.rank, 2)
            assert_close(found[index], 2 * whole[torch.from_numpy(held)], 64)  # both ranks send

    play(2, part)
