"""Groups of a step: order, dealing to ranks and minibatches, and the fingerprint."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.rollouts import Group, Rollout, read_groups, write_rollouts
from megatron_prefix.lab.rl.dataset import RolloutSet, minibatches


def some_groups(count, size=2):
    draw = np.random.default_rng(0)
    return [
        Group(
            f"g{g}",
            tuple(
                Rollout(
                    f"g{g}", str(i), draw.integers(0, 9, 8).astype(np.int32), 3, ((3, 8),), float(i)
                )
                for i in range(size)
            ),
        )
        for g in range(count)
    ]


def names(groups):
    return [group.name for group in groups]


def test_groups_come_in_order_and_then_again():
    rollouts = RolloutSet(tuple(some_groups(5)))
    assert names(rollouts.take(0, 3)) == ["g0", "g1", "g2"]
    assert names(rollouts.take(3, 3)) == ["g3", "g4", "g0"]


@pytest.mark.parametrize(("groups", "parts"), [(6, 4), (0, 1), (2, 3)])
def test_uneven_minibatches_are_refused(groups, parts):
    with pytest.raises(UserError, match=rf"groups-per-step {groups} .* --minibatches {parts}"):
        minibatches(some_groups(groups), parts)


def test_fingerprint_is_of_the_content(tmp_path):
    groups = some_groups(3)
    wanted = RolloutSet(tuple(groups)).fingerprint
    for name, delta in (("a.jsonl", True), ("b.jsonl.gz", False)):
        write_rollouts(tmp_path / name, groups, delta=delta)
        assert RolloutSet(tuple(read_groups(tmp_path / name))).fingerprint == wanted


@pytest.mark.parametrize(
    "change",
    [
        {"reward": 7.0}, {"advantage": 0.5}, {"loss": ((3, 7),)}, {"prompt_len": 2},
        {"uid": "other"}, {"tokens": np.arange(8, dtype=np.int32)},
        {"old_logprobs": np.full(5, -1.0)},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_fingerprint_sees_every_field(change):
    groups = some_groups(2)
    first, second = groups[1].rollouts
    changed = [groups[0], Group("g1", (first, replace(second, **change)))]
    assert RolloutSet(tuple(changed)).fingerprint != RolloutSet(tuple(groups)).fingerprint
