"""Context parallelism without processes: kernels, a segment's own attention, and microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare, UserError
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.lab.rl.batches import on_cp_rank
from megatron_prefix.layers.blocks.adaptive import AdaptiveKernel
from megatron_prefix.layers.blocks.core import own_kernel_runs
from megatron_prefix.layers.blocks.interface import Kernel, Runs
from megatron_prefix.layers.blocks.kernels import KERNELS, CompositeKernel
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.run.calls import CallLayout
from megatron_prefix.run.execute.inputs import SegmentInputs
from megatron_prefix.run.execute.memory_control import MemoryControl
from megatron_prefix.run.read.read_calls import CallTokens, ReadCalls
from megatron_prefix.run.read.step import read_step
from megatron_prefix.tree import cp_layout
from megatron_prefix.tree.payload_map import PayloadMap, RowMap
from tests.harness.played_ranks import PlayedRank, forest, play, random, spread
from tests.harness.trees import flat_rollouts

KERNEL_NAMES = ("math", "flash_cpu")


# Kernels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNEL_NAMES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [((4,), (9,)), ((3, 3, 3), (5, 5, 5)), ((3, 3, 2, 3), (5, 5, 2, 7)), ((1, 1), (1, 2))],
)
def test_a_block_is_a_call_a_run(
    name: str, causal: bool, queries: tuple[int, ...], keys: tuple[int, ...]
) -> None:
    math = KERNELS["math"]
    composite = CompositeKernel(KERNELS[name], math), CompositeKernel(math, KERNELS[name])
    kernels: list[Kernel] = [KERNELS[name], *composite, AdaptiveKernel(KERNELS[name], math, 1)]
    q, k, v = random(sum(queries), 4, 8), random(sum(keys), 2, 8, seed=1), random(sum(keys), 2, 8)
    out, lse, dout = random(sum(queries), 4, 8, seed=2), random(4, sum(queries)), random(*q.shape)
    wanted: list[list[Tensor]] = []
    for mine, seen in zip(spans(queries), spans(keys), strict=True):
        saved = dout[mine], q[mine], k[seen], v[seen], out[mine], lse[:, mine]
        wanted.append(by_scores(*saved, causal))
    for kernel in kernels:
        runs = Runs(queries, keys, causal)
        part = kernel.forward(q, k, v, runs, 0.3)
        gradients = kernel.backward(dout, q, k, v, out, lse, part.aux, runs, 0.3)
        found = [part.out, part.lse.T, *gradients]
        for actual, pieces in zip(found, zip(*wanted, strict=True), strict=True):
            assert_close(actual, torch.cat(pieces), 64, what=kernel.name)


def by_scores(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> list[Tensor]:
    """Output, lse and gradients of one run from its table of scores; a causal mask ends with the
    last query and the last key."""
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    hidden = torch.ones(len(q), len(k)).triu(len(k) - len(q) + 1).bool() & causal
    scores = (0.3 * torch.einsum("shd,thd->hst", q, k)).masked_fill(hidden, -torch.inf)
    first = torch.einsum("hst,thd->shd", scores.softmax(-1), v), scores.logsumexp(-1).T
    p = (scores - lse[..., None]).exp()
    ds = p * (torch.einsum("shd,thd->hst", dout, v) - (dout * out).sum(-1).T[..., None]) * 0.3
    dq = torch.einsum("hst,thd->shd", ds, k)
    dk, dv = torch.einsum("hst,shd->thd", ds, q), torch.einsum("hst,shd->thd", p, dout)
    return [*first, dq, *(x.unflatten(1, (-1, 2)).sum(2) for x in (dk, dv))]


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
        KERNELS["math"].forward(q, k, k, Runs(queries, keys), 0.3)


# A segment's own attention ------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNEL_NAMES)
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    ("lengths", "size"), [((24,), 2), ((16, 16, 16), 2), ((24, 12, 12), 3), ((8, 32), 4)]
)
def test_ranks_compute_together_what_one_does(
    name: str, kept: bool, lengths: tuple[int, ...], size: int
) -> None:
    """Of a segment that no other reads, and of an inner one whose keys every rank keeps."""
    dtype, rows, scale = torch.float64, sum(lengths), 0.4
    q, k, v = random(rows, 4, 8), random(rows, 2, 8, seed=1), random(rows, 2, 6, seed=2)
    v = random(rows, 2, 8, seed=2) if name == "flash_cpu" else v
    dout, exact = random(rows, 4, v.shape[-1], seed=3), KERNELS["math"]
    whole = exact.forward(q, k, v, Runs.own(lengths), scale)
    gradients = exact.backward(dout, q, k, v, *whole, Runs.own(lengths), scale)
    mine = RowMap(rows, (slice(0, rows),), ((),))
    planned = PayloadMap(mine, RowMap(1, (None,), ((),)), ((),), ((),), (lengths,), size)

    def part(rank: PlayedRank) -> list[Tensor]:
        mine = torch.from_numpy(cp_layout.held_positions(lengths, rank.rank, size))
        cache = spread("segment", lambda shares: planned, 1, rank)
        keys = cache.own_keys(0, 0, kept, (k[mine], v[mine]))
        runs = own_kernel_runs(lengths, rank.rank, size)
        forward = KERNELS[name].forward(q[mine], *keys.runs(), runs, scale)
        if not kept:
            keys = cache.own_keys(0, 0, kept, (k[mine], v[mine]))
        query_grad, *gradients = KERNELS[name].backward(
            dout[mine], q[mine], *keys.runs(), *forward, runs, scale
        )
        keys.send((gradients[0], gradients[1]))
        return [forward.out, forward.lse.T, query_grad, *keys.take()]

    in_order = torch.from_numpy(cp_layout.view_order(lengths, size))
    wanted = [whole.out, whole.lse.T, *gradients]
    for what, (pieces, expected) in enumerate(
        zip(zip(*play(size, part), strict=True), wanted, strict=True)
    ):
        assert_close(torch.cat(pieces)[in_order], expected, 2 * rows, dtype, f"result {what}")


# Rows and microbatches ----------------------------------------------------------------------------


def test_every_rank_has_whole_outputs_and_gradients_are_summed() -> None:
    lengths = (8, 12)
    whole, grads = random(1, 20, 3), [random(1, 20, 3, seed=rank) for rank in (1, 2)]

    def part(rank: PlayedRank) -> None:
        mine = torch.from_numpy(cp_layout.held_positions(lengths, rank.rank, 2))
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
            held = cp_layout.held_positions([span.padded for span in segment.spans], rank, 2)
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


def test_samples_that_are_not_cut_into_two_chunks_are_refused() -> None:
    column = np.arange(3)
    known = CallTokens([CallLayout((6,), True)], column, column, None, None)
    groups = SimpleNamespace(pp=Alone(), cp=Alone(2))
    build_nothing: Any = None
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
    reduce: str, steps: str, free: list[float], gathers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The predicted peak is 5; passes without gradients (f) ask nobody."""
    control = MemoryControl(PrefixConfig(cp_reduce=reduce))
    rooms = iter(free)
    monkeypatch.setattr(control, "_least_of", lambda groups, rank: next(rooms))
    peaks = {True: 5.0, False: 1.0}

    def footprint(request: Any, gathers: bool) -> Any:
        return SimpleNamespace(peaks=lambda plan: [SimpleNamespace(peak=peaks[gathers])])

    monkeypatch.setattr(control, "_footprint", footprint)
    forest_of_one = forest()
    joint: Any = SimpleNamespace(lengths=[(1,)], forest=forest_of_one, num_pipelines=1)
    plan = make_plan(forest_of_one)
    rank: Any = SimpleNamespace(groups=SimpleNamespace(cp=Alone(2)), same_schedule=[])
    request: Any = SimpleNamespace(rank=rank, costs=SimpleNamespace(is_known=True))
    found = ""
    for kind in steps:
        rank.forward_only = kind == "f"
        control.settle(plan, joint, request)
        found += "y" if control.gathers else "n"
    assert found == gathers
    rank.groups.cp = Alone()
    control.settle(plan, joint, request)
    assert not control.gathers


def test_when_gradients_are_sent_is_checked() -> None:
    assert PrefixConfig(cp_reduce="segment").cp_reduce == "segment"
    with pytest.raises(UserError, match="cp_reduce is 'layer': give one of auto, wave, segment"):
        PrefixConfig(cp_reduce="layer")
