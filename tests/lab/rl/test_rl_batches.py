"""What a run is told, and what becomes of rollouts: settings, steps, advantages, microbatches."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.rollouts import Group, Rollout, read_groups, write_rollouts
from megatron_prefix.lab.rl import packing
from megatron_prefix.lab.rl.baseline import Baseline, num_packs, pack_sizes
from megatron_prefix.lab.rl.batches import STD_EPS, advantages, microbatch, on_cp_rank
from megatron_prefix.lab.rl.dataset import RolloutSet, minibatches
from megatron_prefix.lab.rl.loss import GrpoConfig
from megatron_prefix.lab.rl.settings import TrainSettings
from megatron_prefix.lab.rl.trainer import check_layout
from megatron_prefix.lab.runtime import Layout
from tests.harness.one_rank import one_rank, small_model


def a_group(*rewards, own=None):
    tokens = np.arange(8, dtype=np.int32)
    return Group(
        "g",
        tuple(
            Rollout("g", str(i), tokens, 3, ((3, 8),), reward, advantage=(own or {}).get(i))
            for i, reward in enumerate(rewards)
        ),
    )


def test_advantages_are_the_normalised_rewards():
    rewards = [1.0, 0.0, 0.0, 0.5]
    mean = sum(rewards) / 4
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 3)
    assert advantages(a_group(*rewards)) == pytest.approx(
        [(r - mean) / (std + STD_EPS) for r in rewards]
    )
    assert advantages(a_group(*rewards), divide_by_std=False) == [r - mean for r in rewards]
    for equal in ((1.0,), (0.1, 0.1, 0.1), (0.0, 0.0)):  # which say nothing
        for divide in (True, False):
            assert advantages(a_group(*equal), divide_by_std=divide) == [0.0] * len(equal)


def test_a_rollouts_own_advantage_wins():
    plain = advantages(a_group(1.0, 0.0, 0.0))
    assert advantages(a_group(1.0, 0.0, 0.0, own={1: 7.5})) == [plain[0], 7.5, plain[2]]
    assert advantages(a_group(1.0, own={0: -2.0})) == [-2.0]


def test_microbatch_fields_line_up_with_labels():
    tokens = np.array([5, 6, 7, 8, 9, 4, 3], dtype=np.int32)
    rollout = Rollout("g", "u", tokens, 2, ((2, 4), (5, 7)), 1.0)
    item = microbatch(rollout, -0.5, ref_logprobs=np.array([-1.0, -2.0, -3.0, -4.0]))
    assert item["tokens"].tolist() == [[5, 6, 7, 8, 9, 4]]
    assert item["labels"].tolist() == [[6, 7, 8, 9, 4, 3]]
    assert item["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]]
    assert item["loss_mask"].tolist() == [[0, 1, 1, 0, 1, 1]]
    assert item["advantages"].tolist() == [[0, -0.5, -0.5, 0, -0.5, -0.5]]
    assert item["ref_logprobs"].tolist() == [[0, -1, -2, 0, -3, -4]]
    assert "old_logprobs" not in item and (item["group"], item["uid"]) == ("g", "u")
    assert item["tokens"].dtype == item["labels"].dtype == item["position_ids"].dtype == torch.int64
    assert item["loss_mask"].dtype == torch.float32


def test_given_old_logprobs_win_over_the_rollouts_own():
    tokens = np.arange(4, dtype=np.int32)
    rollout = Rollout("g", "u", tokens, 2, ((2, 4),), 1.0, old_logprobs=np.array([-1.0, -2.0]))
    assert microbatch(rollout, 1.0)["old_logprobs"].tolist() == [[0, -1, -2]]
    given = microbatch(rollout, 1.0, old_logprobs=np.array([-3.0, -4.0]))
    assert given["old_logprobs"].tolist() == [[0, -3, -4]]


def test_padding_is_at_the_end_and_untrained():
    rollout = Rollout("g", "u", np.arange(1, 7, dtype=np.int32), 2, ((2, 6),), 1.0)
    item = microbatch(rollout, 1.0, multiple=4)
    assert {tuple(v.shape) for v in item.values() if isinstance(v, torch.Tensor)} == {(1, 8)}
    assert item["loss_mask"].tolist() == [[0, 1, 1, 1, 1, 0, 0, 0]]
    assert item["position_ids"].tolist() == [list(range(8))]


def test_learning_rate_rises_and_stays():
    settings = TrainSettings(groups_per_step=1, lr=0.8, warmup_steps=4)
    assert [settings.lr_at(step) for step in (1, 2, 4, 5, 100)] == [0.2, 0.4, 0.8, 0.8, 0.8]
    assert TrainSettings(groups_per_step=1, lr=0.8).lr_at(1) == 0.8


@pytest.mark.parametrize("fields", [
    {"groups_per_step": 0}, {"ppo_epochs": 0}, {"num_minibatches": 0}, {"warmup_steps": -1},
    {"max_skipped": -1}, {"lr": -1e-6}, {"lr": math.nan}, {"clip_grad": math.inf},
    {"weight_decay": -0.1}, {"loss_mean": "sample"},
    {"clip_low": 0.0}, {"clip_low": 1.5}, {"clip_high": -1.0}, {"clip_high": math.inf},
    {"kl_coeff": -0.1}, {"kl_coeff": math.nan},
], ids=str)  # fmt: skip
def test_bad_settings_are_refused(fields):
    (name,) = fields
    kind, usual = TrainSettings, {"groups_per_step": 1}
    if name in GrpoConfig.__dataclass_fields__:
        kind, usual = GrpoConfig, {}
    with pytest.raises(UserError, match=f"^{name} is "):
        kind(**usual | fields)


def some_groups(count):
    """Of two rollouts each, whose tokens differ."""
    draw = np.random.default_rng(0)
    made = [(f"g{number}", a_group(0.0, 1.0).rollouts) for number in range(count)]
    return [
        Group(name, tuple(
            replace(one, group=name, tokens=draw.integers(0, 9, 8, dtype=np.int32))
            for one in rollouts
        ))
        for name, rollouts in made
    ]  # fmt: skip


def names(groups):
    return [group.name for group in groups]


def test_groups_come_in_order_and_then_again():
    rollouts = RolloutSet(tuple(some_groups(5)))
    assert names(rollouts.take(0, 3)) == ["g0", "g1", "g2"]
    assert names(rollouts.take(3, 3)) == ["g3", "g4", "g0"]


def test_fingerprint_is_of_the_content(tmp_path):
    groups = some_groups(3)
    wanted = RolloutSet(tuple(groups)).fingerprint
    for name, delta in (("a.jsonl", True), ("b.jsonl.gz", False)):
        write_rollouts(tmp_path / name, groups, delta=delta)
        assert RolloutSet(tuple(read_groups(tmp_path / name))).fingerprint == wanted


@pytest.mark.parametrize("change", [
    {"reward": 7.0}, {"advantage": 0.5}, {"loss": ((3, 7),)}, {"prompt_len": 2}, {"uid": "other"},
    {"tokens": np.arange(8, dtype=np.int32)}, {"old_logprobs": np.full(5, -1.0)},
], ids=lambda change: next(iter(change)))  # fmt: skip
def test_fingerprint_sees_every_field(change):
    groups = some_groups(2)
    first, second = groups[1].rollouts
    changed = [groups[0], Group("g1", (first, replace(second, **change)))]
    assert RolloutSet(tuple(changed)).fingerprint != RolloutSet(tuple(groups)).fingerprint


def test_minibatches_have_every_group_once_and_equally_many():
    found = [names(groups) for groups in minibatches(some_groups(6), 2)]
    assert found == [["g0", "g1", "g2"], ["g3", "g4", "g5"]]


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


@pytest.mark.parametrize(("layout", "expected"), [
    (Layout(dp=2), [1, 3]), (Layout(dp=2, ep=2), [3, 3]), (Layout(dp=2, pp=2, vpp=2), [4, 4]),
])  # fmt: skip
def test_ranks_have_as_many_packs_as_the_stock_schedule_needs(layout, expected):
    ranks = [[5, 5, 5, 5], [20, 9, 9, 9]]
    assert num_packs(ranks, Baseline("packed", 20), layout) == expected


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


WITHOUT_PACKS = DotProductAttention.__new__(DotProductAttention)
CHUNK = SimpleNamespace(named_modules=lambda: [("decoder.core_attention", WITHOUT_PACKS)])
UNEVEN = RolloutSet((a_group(*2 * [1.0]), a_group(*3 * [1.0])))
MEAN = TrainSettings(groups_per_step=1, loss_mean="rollout")
AUTO = TrainSettings(groups_per_step=1, prefix=PrefixConfig(mode="auto"))


@pytest.mark.parametrize(("call", "message"), [
    # Of layouts, those that would compute another loss.
    (lambda: check_layout(MEAN, UNEVEN, Layout(cp=2)),
     r"--cp 2 with --loss-mean rollout: .* use --loss-mean"),
    (lambda: check_layout(AUTO, UNEVEN, Layout(dp=2, ep=2)),
     r"--ep 2: .* they have 2 to 3; use --prefix-schedule on"),
    *((lambda num=num, parts=parts: minibatches(some_groups(num), parts),
       rf"groups-per-step {num} .* --minibatches {parts}")
      for num, parts in ((6, 4), (0, 1), (2, 3))),
    (lambda: pack_sizes([4, 4], 100, least=3), r"2 rollouts .* 3 microbatches.*--baseline rollout"),
    (lambda: packing.check([CHUNK], Baseline()),
     r"decoder\.core_attention is DotProductAttention, which"),
])  # fmt: skip
def test_what_cannot_be_trained_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_a_balance_by_sample_is_refused():
    spec = dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.01)
    with one_rank():
        chunks = [small_model("tiny-moe", spec=spec)]
    packing.check(chunks, Baseline("rollout"))
    with pytest.raises(UserError, match=r"seq_aux_loss of .*; use --baseline rollout"):
        packing.check(chunks, Baseline())
