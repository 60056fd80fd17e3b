"""Rollouts dealt to data-parallel ranks: each once, evenly, the same for everybody."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.generate import TREES, generate
from megatron_prefix.lab.data.pairs import pairs_of
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.plans.dealing import DEALS, balanced_parts, deal
from megatron_prefix.lab.plans.dealt_tokens import DealtTokens, dealt_tokens
from megatron_prefix.lab.plans.placement import place
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.layers.model import cost_of
from megatron_prefix.tree import TreeOptions
from tests.harness.trees import trie_size

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


# Tokens -------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    st.sampled_from(DEALS), st.integers(2, 4), st.sampled_from(TREES),
    st.sampled_from(["group", "batch"]), st.integers(0, 99),
)  # fmt: skip
def test_tokens_are_those_of_tries(how, dp, tree, share, seed):
    groups = list(generate(3, 24, 32, 4, tree=tree, depth=2, vocab_size=64, seed=seed))
    config = PrefixConfig(min_gain=0)
    ranks = deal(groups, SPEC, Layout(dp=dp), config, how, stock=False, seed=seed)
    found = dealt_tokens(ranks, TreeOptions(min_gain=0, share=share), SPEC)
    rollouts = [[pairs_of(one) for group in rank for one in group.rollouts] for rank in ranks]
    assert found.rollouts == tuple(map(len, rollouts))
    assert found.raw_tokens == tuple(sum(map(len, some)) for some in rollouts)

    def tries(chosen):
        """Of these ranks together."""
        trees = {}
        for group in (group for rank in chosen for group in ranks[rank]):
            tree = trees.setdefault(group.name if share == "group" else "", [])
            tree += map(pairs_of, group.rollouts)
        return sum(map(trie_size, trees.values()))

    assert found.executed_tokens == tuple(tries([rank]) for rank in range(dp))
    assert found.executed_tokens_across_ranks == tries(range(dp))
    # What a rank alone has is what the job executes less without it.
    others = [tries(set(range(dp)) - {rank}) for rank in range(dp)]
    assert found.own_tokens == tuple(tries(range(dp)) - less for less in others)
    assert found.speedup >= 1
    assert found.executed_tokens[found.slowest] == max(found.executed_tokens)


def test_the_slowest_rank_executes_the_mean_or_what_only_it_has():
    even = DealtTokens((2, 2), (40, 40), (30, 24), (10, 4), 34)
    assert (even.slowest, even.speedup) == (0, 40 / 30)
    assert even.speedup_across_ranks == 40 / 17
    uneven = DealtTokens((2, 2), (40, 20), (36, 14), (26, 4), 40)
    assert uneven.speedup_across_ranks == 40 / 26
