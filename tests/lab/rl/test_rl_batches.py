"""Rollouts -> microbatches, and the advantages of a group."""

import math

import numpy as np
import pytest
import torch

from megatron_prefix.lab.data.rollouts import Group, Rollout
from megatron_prefix.lab.rl.batches import STD_EPS, advantages, microbatch


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


@pytest.mark.parametrize("rewards", [(1.0,), (0.1, 0.1, 0.1), (0.0, 0.0)])
@pytest.mark.parametrize("divide", [True, False])
def test_equal_rewards_say_nothing(rewards, divide):
    assert advantages(a_group(*rewards), divide_by_std=divide) == [0.0] * len(rewards)


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
