"""Context parallelism: the sidecar of which every rank holds a part, and what ranks send for it."""

import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare
from megatron_prefix.features.across import carried
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.run.calls import CallLayout
from megatron_prefix.run.execute.memory_control import MemoryControl
from megatron_prefix.run.read.read_calls import CallTokens, ReadCalls
from megatron_prefix.run.read.step import read_step
from megatron_prefix.sidecar.cache import SegmentState
from megatron_prefix.tree import cp_layout
from megatron_prefix.tree.payload_map import payload_map
from tests.harness.played_ranks import PlayedRank, World, forest, play, random, spread

NUM_LAYERS = 2


def filled(rank, reduce, dtype=torch.float64):
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
both_ways = pytest.mark.parametrize("reduce", ["wave", "segment"])


def test_what_comes_for_an_inner_segment_is_gathered_once():
    """Attention starts the exchange, and `capture` ends it; when it runs again, nothing crosses."""
    tree = forest()

    def part(rank):
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


def test_reads_are_gathered_ahead_once_and_released():
    def part(rank):
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
def test_gradients_of_16_bit_keys_are_added_up_in_32(reduce):
    """1 and 1/1024 from each rank and wave: their sums need more than the 8 bits of bfloat16."""
    wanted = torch.full((8, 2, 5), 2 + 2 / 1024)

    def part(rank):
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
def test_a_failed_step_leaves_nothing_behind(reduce):
    def part(rank):
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


def test_a_step_that_fails_in_an_exchange_leaves_nothing_behind(monkeypatch):
    rank, begun = PlayedRank(World(2), 0), []

    def gather(*parts):
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
def test_other_ranks_get_and_send_the_part_of_a_rank(reduce):
    """Nothing crosses between context-parallel ranks for it; what came back is in the sums."""
    more = [
        tuple(random(4, 2, width, seed=9 * rank + width) for width in (3, 2)) for rank in (0, 1)
    ]

    def part(rank):
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


@both_ways
def test_gradients_of_own_keys_are_added_up_in_32_bits(reduce):
    """1 from the late run and 1/1024 from the early one, of each rank: more than bfloat16 holds."""
    tree = forest()

    def part(rank):
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


class Alone:
    """A process group of one rank, or one of several that nobody asks anything of."""

    def __init__(self, size=1):
        self._size = size

    def rank(self):
        return 0

    def size(self):
        return self._size


def test_samples_that_are_not_cut_into_two_chunks_are_refused():
    column = np.arange(3)
    known = CallTokens([CallLayout((6,), True)], column, column, None, None)
    groups = SimpleNamespace(pp=Alone(), cp=Alone(2))
    build_nothing = None
    _, found = read_step(ReadCalls(known, None), groups, build_nothing, torch.device("cpu"))
    assert isinstance(found, CannotShare)
    assert "a sample has 3 positions on a context-parallel rank" in str(found)
    assert "multiple of 4" in str(found)


@pytest.mark.parametrize(
    ("reduce", "steps", "free", "gathers"),
    [("auto", "ttttt", [9, 9, 9], "yyyyy"), ("auto", "ttttt", [9, 3, 9], "ynnnn"),
     ("auto", "ttttt", [4, 9, 9], "nnnnn"), ("auto", "fftfttt", [9, 9, 3], "nnyyynn"),
     ("auto", 53 * "t", [9, 3, 9, 9], 1 * "y" + 52 * "n"),
     ("auto", 152 * "t", [3, 9, 9, 9, 9, 1], 50 * "n" + 100 * "y" + 2 * "n"),
     ("segment", "tft", [], "yyy"), ("wave", "tft", [], "nnn")],
)  # fmt: skip
def test_every_rank_keeps_all_if_the_least_room_allows_it(
    reduce, steps, free, gathers, monkeypatch
):
    """The predicted peak is 5; passes without gradients (f) ask nobody."""
    control = MemoryControl(PrefixConfig(cp_reduce=reduce))
    rooms = iter(free)
    monkeypatch.setattr(control, "_least_of", lambda groups, rank: next(rooms))
    peaks = {True: 5.0, False: 1.0}

    def footprint(request, gathers):
        return SimpleNamespace(peaks=lambda plan: [SimpleNamespace(peak=peaks[gathers])])

    monkeypatch.setattr(control, "_footprint", footprint)
    forest_of_one = forest()
    joint = SimpleNamespace(lengths=[(1,)], forest=forest_of_one, num_pipelines=1)
    plan = make_plan(forest_of_one)
    rank = SimpleNamespace(groups=SimpleNamespace(cp=Alone(2)), same_schedule=[])
    request = SimpleNamespace(rank=rank, costs=SimpleNamespace(is_known=True))
    found = ""
    for kind in steps:
        rank.forward_only = kind == "f"
        control.settle(plan, joint, request)
        found += "y" if control.gathers else "n"
    assert found == gathers
    rank.groups.cp = Alone()
    control.settle(plan, joint, request)
    assert not control.gathers
