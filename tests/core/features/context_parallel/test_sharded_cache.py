"""Context parallelism: the sidecar of which every rank holds a part, and what ranks send for it."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare
from megatron_prefix.features.context_parallel.part import ExchangedLayers
from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.run.calls import CallLayout
from megatron_prefix.run.execute.memory_control import MemoryControl
from megatron_prefix.run.read.read_calls import CallTokens, ReadCalls
from megatron_prefix.run.read.step import read_step
from megatron_prefix.sidecar.cache import SidecarCache
from megatron_prefix.sidecar.row_exchange import Pending, RowExchange
from megatron_prefix.tree import TreeOptions, build, cp_layout
from megatron_prefix.tree.payload_map import Form, payload_map
from tests.harness.ranks import run_ranks
from tests.harness.trees import flat_rollouts


class Alone:
    """A process group of one rank, or one of several that nobody asks anything of."""

    def __init__(self, size=1):
        self._size = size

    def rank(self):
        return 0

    def size(self):
        return self._size


class Noted(RowExchange):
    """One rank; `sent` is what it has sent, call by call."""

    def __init__(self, group):
        super().__init__(group)
        self.sent = []

    def gather(self, *parts):
        self.sent.append(torch.cat(parts, dim=-1))
        return super().gather(*parts)

    def reduce_scatter(self, view):
        self.sent.append(view)
        return super().reduce_scatter(view)


class Lone(Noted):
    """A rank that nobody answers; `coming` is the memory of what it has asked for."""

    def __init__(self):
        super().__init__(Alone(2))
        self.coming = []

    def gather(self, *parts):
        view = torch.cat([torch.cat(parts, dim=-1)] * 2)
        self.coming.append(StorageWeakRef(view.untyped_storage()))
        return Pending((), (view,))

    def reduce_scatter(self, view):
        return Pending((), (view.chunk(2)[0],))


def spread(reduce, planned, num_layers, rank):
    """A rank's sidecar by the name of cp_reduce; `planned` maps an arena of one of so many shares
    of K/V."""
    places = planned({"wave": rank.size, "segment": 1}[reduce])
    forms = [Form.POSITIONS] * num_layers
    return SidecarCache(places, forms, ExchangedLayers(places, forms, rank), rank)


def play(part):
    """Runs `part` on two ranks."""

    def on_rank():
        runtime.initialize(Layout(cp=2))
        part(Noted(parallel_state.get_context_parallel_group()))
        runtime.shutdown()

    run_ranks(2, on_rank)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def forest(align=4):
    """A prompt in a chain of two chunks, and two waves of two rollouts."""
    rollouts, groups = flat_rollouts(16, 8, 4, 1)
    options = TreeOptions(multiple=align, chunk_tokens=8, segment_tokens=16, min_gain=0)
    return build(rollouts, groups, options)


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


WAVE = 2
"""It reads both chunks, 16 positions."""
both_ways = pytest.mark.parametrize("reduce", ["wave", "segment"])


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

    play(part)


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
        assert {given.dtype for given in rank.sent} == {torch.float32}
        found = torch.cat([torch.cat(both, -1) for both in taken if both is not None])
        assert torch.equal(found, wanted)

    play(part)


@both_ways
def test_a_failed_step_leaves_nothing_behind(reduce):
    rank = Lone()
    cache = filled(rank, reduce)
    cache.prefetch(0, 2)
    cache.own_keys(0, WAVE, False, (random(8, 2, 3), random(8, 2, 2)))
    cache.add(1, WAVE, cache.level(WAVE, 0), (random(16, 2, 3), random(16, 2, 2)))
    cache.clear()
    assert cache.device_bytes.held == 0
    with pytest.raises(RuntimeError, match="segment 2 reads segment 0, which is empty: before"):
        cache.read(0, WAVE, cache.level(WAVE, 0))
    with pytest.raises(RuntimeError, match="after its backward"):
        cache.add(0, WAVE, cache.level(WAVE, 0), (random(16, 2, 3), random(16, 2, 2)))


def test_a_step_that_fails_in_an_exchange_leaves_nothing_behind():
    rank = Lone()
    cache = spread("segment", partial(payload_map, forest().segments, None, 2), 1, rank)
    cache.own_keys(0, 0, True, (random(4, 2, 3), random(4, 2, 2)))
    (coming,) = rank.coming
    assert not coming.expired()
    cache.clear()
    assert coming.expired() and cache.device_bytes.held == 0


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

    play(part)


def test_samples_that_are_not_cut_into_two_chunks_are_refused():
    column = np.arange(3)
    known = CallTokens([CallLayout((6,), True)], column, column, None, None)
    groups = SimpleNamespace(pp=Alone(), cp=Alone(2))
    build_nothing = None
    _, found = read_step(ReadCalls(known, None), groups, build_nothing, torch.device("cpu"))
    assert isinstance(found, CannotShare)
    assert "a sample has 3 positions on a context-parallel rank" in str(found)
    assert "multiple of 4" in str(found)


@pytest.mark.parametrize(("reduce", "steps", "free", "gathers"), [
    ("auto", "ttttt", [9, 9, 9], "yyyyy"), ("auto", "ttttt", [9, 3, 9], "ynnnn"),
    ("auto", "ttttt", [4, 9, 9], "nnnnn"), ("auto", "fftfttt", [9, 9, 3], "nnyyynn"),
    ("auto", 53 * "t", [9, 3, 9, 9], 1 * "y" + 52 * "n"),
    ("auto", 152 * "t", [3, 9, 9, 9, 9, 1], 50 * "n" + 100 * "y" + 2 * "n"),
    ("segment", "tft", [], "yyy"), ("wave", "tft", [], "nnn"),
])  # fmt: skip
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
