"""Rollouts dealt to data-parallel ranks: each once, evenly, the same for everybody."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.generate import TREES, generate
from megatron_prefix.lab.data.pairs import pairs_of
from megatron_prefix.lab.data.rollouts import Group, Rollout
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.plans import placement
from megatron_prefix.lab.plans.dealing import DEALS, balanced_parts, deal
from megatron_prefix.lab.plans.dealt_tokens import DealtTokens, dealt_tokens
from megatron_prefix.lab.plans.placement import METHODS, place
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.tree import TreeOptions
from tests.harness import data
from tests.harness.trees import trie_size

SPEC = resolve("tiny-llama").with_vocab(64)
CONFIG = PrefixConfig(min_gain=0)
LENGTHS = st.lists(st.integers(1, 1000), max_size=40)


def some(num=3, size=4, response=24):
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


# Placement: loads are true, and the best order is kept --------------------------------------------


COST = CostModel.of_flops(linear=1000.0, head=80.0, attention=1.0, action_tokens=4.0)
TRIE = CostModel.of_flops(linear=1000.0, head=0.0, attention=1.0, action_tokens=0.0)
"""Without overhead and head a tree's cost is that of its trie, whatever its segments are."""


def rollout(group, uid, tokens, prompt):
    ids = np.array(tokens, dtype=np.int32)
    prompt = min(prompt, len(ids) - 1)
    return Rollout(group, str(uid), ids, prompt, ((prompt, len(ids)),), 0.0)


@st.composite
def steps(draw):
    """Up to six groups over a tiny alphabet, so that rollouts share within and across groups."""
    groups = []
    for g in range(draw(st.integers(0, 6))):
        prompt = draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))
        tails = draw(st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=5))
        rows = [rollout(f"g{g}", i, [*prompt, 0, *t], len(prompt)) for i, t in enumerate(tails)]
        groups.append(Group(f"g{g}", tuple(rows)))
    return groups


def flat(name, prompt, responses):
    """A group whose rollouts part at their first response token."""
    head = [1000 + ord(name[0])] * prompt
    rows = [rollout(name, i, [*head, *([i] * n)], prompt) for i, n in enumerate(responses)]
    return Group(name, tuple(rows))


def partitions(num, parts):
    """All ways to cut 0..num-1 into at most `parts` runs."""
    found = []
    for count in range(1, min(num, parts) + 1):
        for cuts in itertools.combinations(range(1, num), count - 1):
            bounds = [0, *cuts, num]
            found.append([range(a, b) for a, b in itertools.pairwise(bounds)])
    return found


@given(steps(), st.integers(1, 5), st.sampled_from(METHODS), st.sampled_from(["group", "batch"]))
def test_every_rollout_is_on_exactly_one_rank(groups, num_ranks, method, share):
    options = TreeOptions(share=share)
    num = len(names(groups))
    if method == "equal" and num % num_ranks:
        with pytest.raises(UserError, match=f"{num} rollouts on {num_ranks} data-parallel ranks"):
            place(groups, num_ranks, COST, options, method)
        return
    placed = place(groups, num_ranks, COST, options, method)
    assert len(placed.ranks) == len(placed.costs) == num_ranks
    found = Counter(one for rank in placed.ranks for one in names(rank))
    assert found == Counter(names(groups))
    for rank in placed.ranks:  # as they were given: a rank's own order means nothing
        assert names(rank) == [one for one in names(groups) if one in set(names(rank))]
        assert all(group.rollouts for group in rank)
    if method in ("whole", "greedy", "tokens"):
        assert placed.num_cut == 0
    if method in ("whole", "cut") and groups:
        units = len(groups) if method == "whole" else num
        assert sum(map(bool, placed.ranks)) == min(units, num_ranks), "a rank is idle for nothing"
    if method == "equal":
        assert {len(names(rank)) for rank in placed.ranks} == {num // num_ranks}


def test_equal_numbers_of_whole_groups_balanced_by_what_runs():
    """Two heavy groups first: neighbours in their order would leave both to one rank."""
    groups = [flat(name, 40, [n] * 4) for name, n in (("a", 60), ("b", 50), ("c", 6), ("d", 5))]
    placed = place(groups, 2, COST, method="equal")
    assert [[group.name for group in rank] for rank in placed.ranks] == [["a", "d"], ["b", "c"]]
    assert placed.imbalance < 1.1 and placed.num_cut == 0


@given(steps(), st.integers(1, 4))
def test_a_load_is_the_cost_of_the_trees(groups, num_ranks):
    """What the search adds up rollout by rollout is what the planner's trees cost."""
    leaves = placement.Leaves(groups, TRIE, TreeOptions(min_gain=0))
    placed = place(groups, num_ranks, TRIE, TreeOptions(min_gain=0), "cut")
    parts = placement.partition(leaves, num_ranks, "cut")
    found = [leaves.load(part) for part in parts] + [0.0] * (num_ranks - len(parts))
    assert found == pytest.approx(placed.costs)
    # And of leaves that are no neighbours, over groups that share.
    options = TreeOptions(min_gain=0, share="batch")
    rows = [replace(one, group="all", uid=str(i)) for i, one in enumerate(rollouts(groups))]
    if rows:
        one = [Group("all", tuple(rows))]
        leaves = placement.Leaves(one, TRIE, options)
        every_other = range(0, len(rows), 2)
        chosen = tuple(rows[leaves.order[i].rollout] for i in every_other)
        wanted = place([Group("all", chosen)], 1, TRIE, options).costs[0]
        assert leaves.load(every_other) == pytest.approx(wanted)


def rollouts(groups):
    return [one for group in groups for one in group.rollouts]


@given(steps(), st.integers(1, 4), st.sampled_from(["whole", "cut"]))
def test_no_other_partition_has_a_smaller_largest_load(groups, num_ranks, method):
    leaves = placement.Leaves(groups, COST, TreeOptions(share="batch"))
    single = [range(i, i + 1) for i in range(len(leaves.order))]
    units = leaves.groups if method == "whole" else single
    if not units or len(units) > 10:
        return
    best = min(
        max(leaves.load(range(units[run[0]].start, units[run[-1]].stop)) for run in runs)
        for runs in partitions(len(units), num_ranks)
    )
    found = max(map(leaves.load, placement.partition(leaves, num_ranks, method)))
    assert found == pytest.approx(best)


def test_a_cut_group_pays_for_its_prompt_in_both_parts():
    large, small = flat("large", 40, [100] * 8), flat("small", 40, [50])
    placed = place([large, small], 2, COST, TreeOptions(min_gain=0))
    assert placed.method == "cut"
    assert placed.num_cut == 1
    assert placed.imbalance < 1.15
    whole = place([large, small], 2, COST, TreeOptions(min_gain=0), "whole")
    assert whole.num_cut == 0
    # 40 prompt tokens are 39 positions that all share: the label of the last one differs.
    assert placed.executed_tokens == whole.executed_tokens + 39
    assert max(placed.costs) < 0.7 * max(whole.costs)


@pytest.mark.parametrize("name", ["tau2_mixed", "qmsum_tree"])
@pytest.mark.parametrize("share", ["group", "batch"])
def test_real_rollouts_are_balanced_by_tree(name, share):
    groups = data.groups(name, 40)
    cost = cost_of(resolve("llama3-8b"))
    options = TreeOptions(share=share)
    ours, raw = (place(groups, 4, cost, options, method) for method in ("auto", "tokens"))
    assert ours.imbalance < 1.07
    assert max(ours.costs) < max(raw.costs)
