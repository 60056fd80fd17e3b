"""Placement on data-parallel ranks: nothing lost, loads that are true, and the best order keeps."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_prefix.errors import UserError
from megatron_prefix.lab.data.rollouts import Group, Rollout
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.plans import placement
from megatron_prefix.lab.plans.placement import METHODS, place
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.tree import TreeOptions
from tests.harness import data

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


def members(groups):
    return [(group.name, one.uid) for group in groups for one in group.rollouts]


def partitions(num, parts):
    """All ways to cut 0..num-1 into at most `parts` runs."""
    found = []
    for count in range(1, min(num, parts) + 1):
        for cuts in itertools.combinations(range(1, num), count - 1):
            bounds = [0, *cuts, num]
            found.append([range(a, b) for a, b in itertools.pairwise(bounds)])
    return found


# Every method -------------------------------------------------------------------------------------


@given(steps(), st.integers(1, 5), st.sampled_from(METHODS), st.sampled_from(["group", "batch"]))
def test_every_rollout_is_on_exactly_one_rank(groups, num_ranks, method, share):
    options = TreeOptions(share=share)
    num = len(members(groups))
    if method == "equal" and num % num_ranks:
        with pytest.raises(UserError, match=f"{num} rollouts on {num_ranks} data-parallel ranks"):
            place(groups, num_ranks, COST, options, method)
        return
    placed = place(groups, num_ranks, COST, options, method)
    assert len(placed.ranks) == len(placed.costs) == num_ranks
    found = Counter(one for rank in placed.ranks for one in members(rank))
    assert found == Counter(members(groups))
    for rank in placed.ranks:  # as they were given: a rank's own order means nothing
        assert members(rank) == [one for one in members(groups) if one in set(members(rank))]
        assert all(group.rollouts for group in rank)
    if method in ("whole", "greedy", "tokens"):
        assert placed.num_cut == 0
    if method in ("whole", "cut") and groups:
        units = len(groups) if method == "whole" else num
        assert sum(map(bool, placed.ranks)) == min(units, num_ranks), "a rank is idle for nothing"
    if method == "equal":
        assert {len(members(rank)) for rank in placed.ranks} == {num // num_ranks}


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
    rows = [replaced(one, "all", str(i)) for i, one in enumerate(rollouts(groups))]
    if rows:
        one = [Group("all", tuple(rows))]
        leaves = placement.Leaves(one, TRIE, options)
        every_other = range(0, len(rows), 2)
        chosen = tuple(rows[leaves.order[i].rollout] for i in every_other)
        wanted = place([Group("all", chosen)], 1, TRIE, options).costs[0]
        assert leaves.load(every_other) == pytest.approx(wanted)


def rollouts(groups):
    return [one for group in groups for one in group.rollouts]


def replaced(one, group, uid):
    return Rollout(group, uid, one.tokens, one.prompt_len, one.loss, one.reward)


# The ordered partition ----------------------------------------------------------------------------


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


# Greedy -------------------------------------------------------------------------------------------


# Bad usage, and real rollouts ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tau2_mixed", "qmsum_tree"])
@pytest.mark.parametrize("share", ["group", "batch"])
def test_real_rollouts_are_balanced_by_tree(name, share):
    groups = data.groups(name, 40)
    cost = cost_of(resolve("llama3-8b"))
    options = TreeOptions(share=share)
    ours, raw = (place(groups, 4, cost, options, method) for method in ("auto", "tokens"))
    assert ours.imbalance < 1.07
    assert max(ours.costs) < max(raw.costs)
