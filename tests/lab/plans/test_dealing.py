"""Rollouts dealt to data-parallel ranks: each once, evenly, the same for everybody."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.plans.dealing import DEALS, balanced_parts, deal
from megatron_prefix.lab.plans.placement import place
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.layers.model import cost_of

SPEC = resolve("tiny-llama").with_vocab(64)
CONFIG = PrefixConfig(min_gain=0)
LENGTHS = st.lists(st.integers(1, 1000), max_size=40)


def some(num=3, size=4, response=24):
    """Groups of uneven rollouts."""
    return list(generate(num, 32, response, size, vocab_size=64, seed=3))


def dealt(groups, dp, how, **more):
    layout = Layout(**{"dp": dp, **more.pop("layout", {})})
    return deal(groups, SPEC, layout, CONFIG, how, **{"stock": False, **more})


def names(groups):
    return [(group.name, one.uid) for group in groups for one in group.rollouts]


@given(LENGTHS, st.integers(1, 8))
def test_parts_hold_each_once_in_near_equal_sums(lengths, num_parts):
    parts = balanced_parts(lengths, num_parts)
    assert sorted(number for part in parts for number in part) == list(range(len(lengths)))
    assert len(parts) == num_parts
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1
    sums = [sum(lengths[number] for number in part) for part in parts]
    assert max(sums) - min(sums) <= max(lengths, default=0)
    assert parts == balanced_parts(lengths, num_parts)


def test_sums_are_equal_where_differences_cancel():
    """Blocks (8, 7), (6, 5), (4, 3), (2, 1): two and two cancel. Dealt in turn: 20 and 16."""
    parts = balanced_parts([8, 7, 6, 5, 4, 3, 2, 1], 2)
    assert [sum(8 - number for number in part) for part in parts] == [18, 18]
    # 9 + 1 and 6 + 4: a rank of 9 + 6 would have 15 of 20.
    assert sorted(map(sorted, balanced_parts([9, 6, 4, 1], 2))) == [[0, 3], [1, 2]]


@pytest.mark.parametrize("how", DEALS)
@pytest.mark.parametrize("dp", [1, 2, 3, 5])
def test_every_rollout_is_on_one_rank_in_the_order_of_the_file(how, dp):
    groups = some()
    ranks = dealt(groups, dp, how)
    everyone = names(groups)
    assert len(ranks) == dp
    found = [[name for name in names(rank) if name[0] != "idle"] for rank in ranks]
    assert Counter(name for rank in found for name in rank) == Counter(everyone)
    assert all(rank == sorted(rank, key=everyone.index) for rank in found)
    assert all(len({group.name for group in rank}) == len(rank) for rank in ranks)
    assert list(map(names, dealt(groups, dp, how))) == list(map(names, ranks))
    if how != "groups":
        counts = list(map(len, found))
        assert max(counts) - min(counts) <= 1


def test_groups_are_dealt_as_they_are_placed():
    groups = some(5)
    placed = place(groups, 2, cost_of(SPEC), CONFIG.tree_options(1))
    assert list(map(names, dealt(groups, 2, "groups"))) == list(map(names, placed.ranks))


def test_random_is_another_deal_with_another_seed():
    deals = [tuple(names(dealt(some(), 2, "random", seed=seed)[0])) for seed in range(8)]
    assert len(set(deals)) > 4
    assert deals[3] == tuple(names(dealt(some(), 2, "random", seed=3)[0]))


@pytest.mark.parametrize("how", ["length", "random"])
def test_a_rank_without_rollouts_has_a_position_without_loss(how):
    ranks = dealt(some(1, 2), 3, how)
    assert [[group.name for group in rank] for rank in ranks][2] == ["idle"]
    assert ranks[2][0].rollouts[0].loss == ()


@pytest.mark.parametrize("how", DEALS)
def test_what_needs_equal_numbers_is_refused(how):
    """Ranks that share experts meet in every microbatch of the stock schedule."""
    groups = some(3, 3)
    with pytest.raises(UserError, match="9 rollouts on 2 data-parallel ranks"):
        dealt(groups, 2, how, stock=True, layout={"ep": 2})
    assert dealt(some(2, 3), 2, how, stock=True, layout={"ep": 2})
    with pytest.raises(UserError, match="multiples of --pp 2, and there are 3"):
        dealt(some(2, 3), 2, how, stock=True, layout={"pp": 2, "vpp": 2})
