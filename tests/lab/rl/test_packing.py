"""Rollouts packed into microbatches: how many in each, and what a pack's fields are."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.rollouts import Rollout
from megatron_prefix.lab.rl import packing
from megatron_prefix.lab.rl.baseline import Baseline, num_packs, pack_sizes
from megatron_prefix.lab.rl.batches import microbatch, on_cp_rank
from megatron_prefix.lab.runtime.layout import Layout

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@given(LENGTHS, st.integers(1, 60), st.data())
def test_packs_hold_all_rollouts_in_order_within_the_limit(lengths, most, data):
    least = data.draw(st.integers(1, len(lengths)))
    sizes = pack_sizes(lengths, most, least)
    assert sum(sizes) == len(lengths) and min(sizes) >= 1
    assert len(sizes) == max(least, len(pack_sizes(lengths, most)))
    packs = [part.tolist() for part in np.split(np.array(lengths), np.cumsum(sizes)[:-1])]
    assert all(sum(pack) <= most or len(pack) == 1 for pack in packs)


def test_a_pack_is_filled_before_the_next_begins():
    assert pack_sizes([5, 5, 5, 20, 1, 1], 10) == [2, 1, 1, 2]
    assert pack_sizes([5, 5, 5, 5], 100, least=3) == [1, 1, 2]


def test_fewer_rollouts_than_microbatches_are_refused():
    with pytest.raises(UserError, match=r"2 rollouts .* 3 microbatches.*--baseline rollout"):
        pack_sizes([4, 4], 100, least=3)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [(Layout(dp=2), [1, 3]), (Layout(dp=2, ep=2), [3, 3]), (Layout(dp=2, pp=2, vpp=2), [4, 4])],
)
def test_ranks_have_as_many_packs_as_the_stock_schedule_needs(layout, expected):
    ranks = [[5, 5, 5, 5], [20, 9, 9, 9]]
    assert num_packs(ranks, Baseline("packed", 20), layout) == expected


# Fields -------------------------------------------------------------------------------------------


def items(multiple=1):
    rollouts = [
        Rollout("g", str(n), np.arange(n, 2 * n + 3, dtype=np.int32), 2, ((2, n + 3),), 1.0)
        for n in (4, 2, 7)
    ]
    return [microbatch(rollout, 0.5, multiple=multiple) for rollout in rollouts]


def test_fields_lie_one_behind_the_other():
    whole = items()
    pack = packing.pack(whole)
    for name in ("tokens", "labels", "position_ids", "loss_mask", "advantages"):
        assert torch.equal(pack[name], torch.cat([item[name] for item in whole], 1))
    assert pack["position_ids"][0].tolist() == [*range(6), *range(4), *range(9)]
    assert pack["cu_seqlens"].tolist() == [0, 6, 10, 19]
    described = packing.packed_seq_params(pack, torch.device("cpu"))
    assert described is not None and described.qkv_format == "thd"
    assert described.cu_seqlens_q.tolist() == described.cu_seqlens_kv.tolist() == [0, 6, 10, 19]
    assert described.cu_seqlens_q.dtype == torch.int32
    assert (described.max_seqlen_q, described.max_seqlen_kv) == (9, 9)
    assert packing.packed_seq_params(whole[0], torch.device("cpu")) is None


def test_slices_of_a_context_parallel_rank_are_of_each_rollout():
    slices = [on_cp_rank(item, 1, 2) for item in items(4)]
    pack = packing.pack(slices, 2)
    assert pack["position_ids"][0].tolist() == [2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 7, 8]
    described = packing.packed_seq_params(pack, torch.device("cpu"))
    ends = [described.cu_seqlens_q, described.cu_seqlens_q_padded, described.cu_seqlens_kv_padded]
    assert [one.tolist() for one in ends] == [[0, 8, 12, 24]] * 3


# Refusals -----------------------------------------------------------------------------------------


def test_an_attention_without_packs_is_refused():
    attention = DotProductAttention.__new__(DotProductAttention)
    chunk = SimpleNamespace(named_modules=lambda: [("decoder.core_attention", attention)])
    with pytest.raises(UserError, match=r"decoder\.core_attention is DotProductAttention, which"):
        packing.check([chunk], Baseline())
