"""Context parallelism without processes: who holds what, what is seen, and what is sent.

Several ranks are played by threads of this process, which wait for one another as ranks do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_prefix.attention import zigzag
from megatron_prefix.attention.adaptive import AdaptiveKernel
from megatron_prefix.attention.blocks import Block
from megatron_prefix.attention.context_parallel import Exchange, ShardedCache
from megatron_prefix.attention.interface import Kernel
from megatron_prefix.attention.kernels import KERNELS, CompositeKernel
from megatron_prefix.attention.merge import merge
from megatron_prefix.attention.own import SpreadRows
from megatron_prefix.cache import State
from megatron_prefix.config import PrefixConfig
from megatron_prefix.data.batch import SegmentInputs
from megatron_prefix.errors import UserError
from megatron_prefix.numerics import assert_close
from megatron_prefix.pipeline.step import read_step
from megatron_prefix.rl.batches import on_cp_rank
from megatron_prefix.tree import Forest, Pairs, TreeOptions, build
from tests.harness.trees import flat_rollouts

KERNEL_NAMES = ("math", "flash_cpu")

T = TypeVar("T")


class World:
    """What played ranks have sent: per call, in each rank's order, what every rank gave."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._given: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._news = threading.Condition()

    def give(self, number: int, rank: int, tensors: tuple[Tensor, ...]) -> None:
        with self._news:
            self._given[number, rank] = tensors
            self._news.notify_all()

    def of_all(self, number: int) -> list[tuple[Tensor, ...]]:
        keys = [(number, rank) for rank in range(self.size)]
        with self._news:
            if not self._news.wait_for(lambda: all(key in self._given for key in keys), 10):
                raise TimeoutError(f"call {number}: a rank has not come")
            return [self._given[key] for key in keys]


@dataclass
class Later:
    """In the place of Pending."""

    make: Callable[[], tuple[Tensor, ...]]
    tensors: tuple[Tensor, ...] = ()

    def wait(self) -> tuple[Tensor, ...]:
        self.tensors = self.make()
        return self.tensors


class PlayedRank(Exchange):
    """One of several ranks in this process; `sent` is what it has sent, call by call."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self.rank, self.size = world, rank, world.size
        self.sent: list[tuple[Tensor, ...]] = []

    def _give(self, *tensors: Tensor) -> int:
        self._world.give(len(self.sent), self.rank, tensors)
        self.sent.append(tensors)
        return len(self.sent) - 1

    def gather(self, *slices: Tensor) -> Any:
        number = self._give(*slices)
        return Later(lambda: tuple(map(torch.cat, zip(*self._world.of_all(number), strict=True))))

    def reduce_scatter(self, view: Tensor) -> Any:
        number = self._give(view)

        def mine() -> tuple[Tensor, ...]:
            total = sum(given for (given,) in self._world.of_all(number))
            return (total.chunk(self.size)[self.rank],)  # type: ignore[union-attr]

        return Later(mine)


def play(size: int, part: Callable[[PlayedRank], T]) -> list[T]:
    """What `part` returns on every rank."""
    world = World(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(part, [PlayedRank(world, rank) for rank in range(size)]))


@st.composite
def segments(draw: Any) -> tuple[tuple[int, ...], int]:
    """Lengths of a segment's rows, and the number of ranks."""
    size = draw(st.integers(2, 5))
    chunks = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    return tuple(2 * size * chunk for chunk in chunks), size


# Who holds what -----------------------------------------------------------------------------------


def test_positions_of_a_row() -> None:
    assert zigzag.positions(12, 0, 2).tolist() == [0, 1, 2, 9, 10, 11]
    assert zigzag.positions(12, 1, 2).tolist() == [3, 4, 5, 6, 7, 8]
    assert zigzag.positions(5, 0, 1).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("length", [6, 10, 2])
def test_a_row_that_cannot_be_cut_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"{length} positions .* multiple of 4"):
        zigzag.positions(length, 0, 2)


@given(segments())
def test_every_row_is_held_once_and_the_order_is_found_again(case: Any) -> None:
    lengths, size = case
    held = [zigzag.segment_rows(lengths, rank, size) for rank in range(size)]
    assert sorted(np.concatenate(held)) == list(range(sum(lengths)))
    assert len({len(rows) for rows in held}) == 1
    in_order = np.concatenate(held)[zigzag.order(lengths, size)]
    assert in_order.tolist() == list(range(sum(lengths)))


def test_no_rows_at_all() -> None:
    assert zigzag.segment_rows([], 0, 2).tolist() == []


# What is seen -------------------------------------------------------------------------------------


def times_seen(lengths: tuple[int, ...], rank: int, size: int) -> np.ndarray:
    """How many blocks show a query of this rank a key of the segment, [queries, keys]."""
    local = sum(lengths) // size
    seen = np.zeros((local, sum(lengths)), int)  # keys in the order of the view
    blocks = zigzag.own_blocks(lengths, rank, size)
    start = 0
    for chunk in blocks.chunks:
        keys = rank * local + start
        seen[start : start + chunk, keys : keys + chunk] += np.tri(chunk, dtype=int)
        start += chunk
    for block in blocks.paired:
        queries = np.split(block.queries, np.cumsum(block.query_lengths))
        keys_of = np.split(block.keys, np.cumsum(block.key_lengths))
        for mine, keys in zip(queries, keys_of, strict=True):
            seen[np.ix_(mine, keys)] += 1
    return seen[:, zigzag.order(lengths, size)]


@given(segments())
def test_a_query_sees_its_rows_past_once_and_nothing_else(case: Any) -> None:
    lengths, size = case
    row = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(sum(lengths))
    wanted = (row[:, None] == row) & (position[:, None] >= position)
    work = set()
    for rank in range(size):
        mine = zigzag.segment_rows(lengths, rank, size)
        seen = times_seen(lengths, rank, size)
        assert np.array_equal(seen, wanted[mine].astype(int)), f"rank {rank}"
        work.add(int(seen.sum()))
    assert len(work) == 1, "every rank has the same work"


def test_few_blocks() -> None:
    """Equal rows are one batch; the first rank has nothing that both its chunks see."""
    assert [len(zigzag.own_blocks((8, 8, 8), rank, 2).paired) for rank in (0, 1)] == [1, 2]


# Kernels ------------------------------------------------------------------------------------------


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("name", KERNEL_NAMES)
@pytest.mark.parametrize(
    ("queries", "keys"),
    [((4,), (9,)), ((3, 3, 3), (5, 5, 5)), ((3, 3, 2, 3), (5, 5, 1, 7)), ((1, 1), (1, 2))],
)
def test_a_paired_block_is_a_dense_block_a_rollout(
    name: str, queries: tuple[int, ...], keys: tuple[int, ...]
) -> None:
    math = KERNELS["math"]
    composite = CompositeKernel(KERNELS[name], math)
    kernels: list[Kernel] = [KERNELS[name], composite, AdaptiveKernel(KERNELS[name], math, 1)]
    q, k, v = random(sum(queries), 4, 8), random(sum(keys), 2, 8, seed=1), random(sum(keys), 2, 8)
    out, lse, dout = random(sum(queries), 4, 8, seed=2), random(4, sum(queries)), random(*q.shape)
    wanted: list[list[Tensor]] = []
    for mine, seen in zip(spans(queries), spans(keys), strict=True):
        part = math.dense(q[mine], k[seen], v[seen], 0.3)
        saved = dout[mine], q[mine], k[seen], v[seen], out[mine], lse[:, mine]
        gradients = math.dense_backward(*saved, part.aux, 0.3)
        wanted.append([part.out, part.lse.T, *gradients])
    for kernel in kernels:
        part = kernel.paired(q, k, v, 0.3, queries, keys)
        gradients = kernel.paired_backward(dout, q, k, v, out, lse, part.aux, 0.3, queries, keys)
        found = [part.out, part.lse.T, *gradients]
        for actual, pieces in zip(found, zip(*wanted, strict=True), strict=True):
            assert_close(actual, torch.cat(pieces), 64, what=kernel.name)


def spans(lengths: Sequence[int]) -> list[slice]:
    ends = np.cumsum(lengths).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


@pytest.mark.parametrize(
    ("queries", "keys", "message"),
    [((2, 2), (6,), "shorter"), ((2, 1), (3, 3), "sum to 4"), ((4, 0), (3, 3), "positive")],
)
def test_lengths_that_do_not_fit_are_refused(queries: Any, keys: Any, message: str) -> None:
    q, k = random(4, 2, 8), random(6, 2, 8)
    with pytest.raises(ValueError, match=message):
        KERNELS["math"].paired(q, k, k, 0.3, queries, keys)


# A segment's own attention ------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNEL_NAMES)
@pytest.mark.parametrize(
    ("lengths", "size"), [((24,), 2), ((16, 16, 16), 2), ((24, 12, 12), 3), ((8, 32), 4)]
)
def test_spread_rows_compute_what_one_rank_does(
    name: str, lengths: tuple[int, ...], size: int
) -> None:
    dtype, rows, scale = torch.float64, sum(lengths), 0.4
    q, k, v = random(rows, 4, 8), random(rows, 2, 8, seed=1), random(rows, 2, 6, seed=2)
    v = random(rows, 2, 8, seed=2) if name == "flash_cpu" else v
    dout, exact = random(rows, 4, v.shape[-1], seed=3), KERNELS["math"]
    whole = exact.causal(q, k, v, scale, lengths)
    gradients = exact.causal_backward(dout, q, k, v, *whole, scale, lengths)

    def part(rank: PlayedRank) -> list[Tensor]:
        mine = torch.from_numpy(zigzag.segment_rows(lengths, rank.rank, size))
        local = tuple(length // size for length in lengths)
        rows = SpreadRows(KERNELS[name], rank, q[mine], k[mine], v[mine], scale, local)
        parts = rows.forward()
        out, lse = merge(parts)
        query_grad = rows.backward(dout[mine], out, lse, [part.aux for part in parts])
        return [out, lse.T, query_grad, *rows.gradients()]

    in_order = torch.from_numpy(zigzag.order(lengths, size))
    wanted = [whole.out, whole.lse.T, *gradients]
    for what, (pieces, expected) in enumerate(
        zip(zip(*play(size, part), strict=True), wanted, strict=True)
    ):
        assert_close(torch.cat(pieces)[in_order], expected, 2 * rows, dtype, f"result {what}")


# The sidecar --------------------------------------------------------------------------------------

NUM_LAYERS = 2


def forest(align: int = 4) -> Forest:
    """A prompt in a chain of two chunks, and two waves of two rollouts."""
    rollouts, groups = flat_rollouts(16, 8, 4, 1)
    options = TreeOptions(align=align, chunk_tokens=8, wave_tokens=16, min_gain=0)
    return build(rollouts, groups, options)


def filled(rank: PlayedRank, reduce: str) -> ShardedCache:
    """A rank's sidecar with the K/V of the prompt; position p has the key p in layer 0."""
    tree = forest()
    assert [segment.inner for segment in tree.segments] == [True, True, False, False]
    cache = ShardedCache(tree.segments, NUM_LAYERS, rank, reduce)
    for layer in range(NUM_LAYERS):
        for index in (0, 1):
            held = torch.from_numpy(zigzag.positions(8, rank.rank, 2) + 8 * index)
            key = (100.0 * layer + held).double().view(-1, 1, 1).expand(-1, 2, 3)
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
            cache.prefetch(layer, (PROMPT,))
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
    held = [np.concatenate([zigzag.positions(8, rank, 2) + c for c in (0, 8)]) for rank in (0, 1)]
    parts = [[random(16, 2, 5, seed=10 * wave + rank) for wave in (0, 1)] for rank in (0, 1)]
    total = torch.zeros(16, 2, 5, dtype=torch.float64)
    total[np.concatenate(held)] = sum(parts[0] + parts[1])

    def part(rank: PlayedRank) -> None:
        cache = filled(rank, reduce)
        for wave in parts[rank.rank]:
            cache.add_gradient(0, PROMPT, wave[..., :3], wave[..., 3:])
        for index in (1, 0):
            taken = cache.take_gradient(0, index)
            assert taken is not None and cache.state(0, index) is State.CONSUMED
            mine = total[8 * index + zigzag.positions(8, rank.rank, 2)]
            assert_close(torch.cat(taken, -1), mine, 4)
        # Two waves of the whole chain, or the two chunks once each.
        rows = {"wave": [16, 16], "segment": [8, 8]}[reduce]
        assert [given.shape for (given,) in rank.sent] == [(n, 2, 5) for n in rows]

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
    cache.prefetch(0, (PROMPT,))  # the other rank does not come any more
    cache.add_gradient(1, PROMPT, random(16, 2, 3), random(16, 2, 2))
    cache.clear()
    assert cache.num_bytes == 0
    with pytest.raises(RuntimeError, match="0 there: before their forward"):
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


# Rows and microbatches ----------------------------------------------------------------------------


def test_outputs_are_whole_on_every_rank_and_their_gradients_are_added_up() -> None:
    lengths = (8, 12)
    whole, grads = random(1, 20, 3), [random(1, 20, 3, seed=rank) for rank in (1, 2)]

    def part(rank: PlayedRank) -> None:
        mine = torch.from_numpy(zigzag.segment_rows(lengths, rank.rank, 2))
        assert torch.equal(rank.whole(whole[:, mine], lengths), whole)
        share = rank.share(grads[rank.rank], lengths)
        assert torch.equal(share, (grads[0] + grads[1])[:, mine])

    play(2, part)


def test_a_rank_runs_its_rows_at_their_true_positions() -> None:
    rollouts, _ = flat_rollouts(16, 8, 4, 1)
    tree, cpu = forest(), torch.device("cpu")
    whole = SegmentInputs(tree, rollouts, cpu)
    for rank in range(2):
        mine = SegmentInputs(tree, rollouts, cpu, rank, 2)
        assert mine.max_position == whole.max_position == 23
        for index, segment in enumerate(tree.segments):
            held = zigzag.segment_rows([row.padded for row in segment.rows], rank, 2)
            assert torch.equal(mine[index], whole[index][:, held])


def test_a_microbatch_is_cut_along_its_positions() -> None:
    item = {
        "tokens": torch.arange(8)[None],
        "advantages": 10.0 * torch.arange(8)[None],
        "scalar": torch.tensor(1.0),
        "group": "g",
    }
    cut = on_cp_rank(item, 1, 2)
    assert cut["tokens"].tolist() == [[2, 3, 4, 5]]
    assert cut["advantages"].tolist() == [[20.0, 30.0, 40.0, 50.0]]
    assert cut["scalar"] is item["scalar"] and cut["group"] == "g"
    assert on_cp_rank(item, 0, 1) == item


class Alone:
    """A process group of one rank, or one of several that nobody asks anything of."""

    def __init__(self, size: int = 1) -> None:
        self._size = size

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size


class OnePosition:
    """An adapter of samples that are not cut into two chunks."""

    def pairs(self, item: Any) -> list[Pairs]:
        return [Pairs(np.arange(3), np.arange(3), np.ones(3, bool))]

    def group(self, item: Any) -> str:
        return "g"


def test_samples_that_are_not_cut_are_refused() -> None:
    with pytest.raises(UserError, match=r"rollout 0 has 3 positions .* multiple of 4"):
        read_step(
            iter([None]),
            1,
            OnePosition(),
            Alone(),
            Alone(2),
            TreeOptions(4),
            torch.device("cpu"),  # type: ignore[arg-type]
        )


def test_when_gradients_are_sent_is_checked() -> None:
    assert PrefixConfig(cp_reduce="segment").cp_reduce == "segment"
    with pytest.raises(UserError, match="cp_reduce is 'layer': give one of wave, segment"):
        PrefixConfig(cp_reduce="layer")
