"""Synthetic rollouts have the size and shape asked for, and the bundled file is made of them."""

import gzip
from collections import Counter

import numpy as np
import pytest

from megatron_prefix.lab.data.checks import check_rollout
from megatron_prefix.lab.data.generate import bundled_groups, bundled_rollouts, generate
from megatron_prefix.lab.data.rollouts import common_prefix, write_rollouts


def num_trie_nodes(group):
    """Tokens of the group's trie, by brute force."""
    return len({tuple(r.tokens[:i].tolist()) for r in group.rollouts for i in range(1, len(r) + 1)})


def num_shared_trained(group):
    """Trained tokens that another rollout passes too."""
    prefixes = Counter(
        tuple(r.tokens[: i + 1].tolist())
        for r in group.rollouts
        for i in np.flatnonzero(r.loss_mask)
    )
    return sum(count for count in prefixes.values() if count > 1)


def leaf_depths(group):
    """For each rollout, the number of places where it parts from others."""
    return [
        len({common_prefix(r.tokens, other.tokens) for other in group.rollouts} - {len(r)})
        for r in group.rollouts
    ]


@pytest.mark.parametrize("tree", ["flat", "branch", "turns"])
@pytest.mark.parametrize("uneven", [False, True])
def test_size_and_validity(tree, uneven):
    groups = list(generate(5, 40, 60, 7, tree=tree, depth=3, vocab_size=64, uneven=uneven, seed=3))
    assert [group.name for group in groups] == [f"synthetic-{i:04d}" for i in range(5)]
    for group in groups:
        assert len(group.rollouts) == 7
        for r in group.rollouts:
            check_rollout(r, vocab_size=64)
            assert r.prompt_len == r.loss[0][0] == 40
            assert r.loss[-1][1] == len(r), "the sequence ends with a trained token"
            assert 40 + 15 <= len(r) <= 100 if uneven else len(r) == 100
            assert np.array_equal(r.tokens[:40], group.rollouts[0].tokens[:40])
        assert len({r.tokens.tobytes() for r in group.rollouts}) == 7
        assert {r.reward for r in group.rollouts} == {0.0, 1.0}
    if uneven:
        assert len({len(r) for group in groups for r in group.rollouts}) > 5


def test_flat_is_a_star():
    for group in generate(4, 20, 10, 9, tree="flat", vocab_size=16, seed=1):
        assert num_trie_nodes(group) == 20 + 9 * 10
        assert leaf_depths(group) == [1] * 9
        assert all(r.loss == ((20, 30),) for r in group.rollouts)


def test_branch_is_a_regular_tree():
    """8 rollouts on 3 levels of 10 tokens: 2, 4 and 8 segments under the prompt, loss in all."""
    for group in generate(4, 20, 30, 8, tree="branch", depth=3, vocab_size=16, seed=2):
        assert num_trie_nodes(group) == 20 + 10 * (2 + 4 + 8)
        assert leaf_depths(group) == [3] * 8
        assert num_shared_trained(group) == 8 * 20


def test_turns_are_a_ragged_tree_with_untrained_answers():
    groups = list(generate(60, 20, 80, 8, tree="turns", depth=4, seed=4))
    assert all(len(r.loss) == 4 for group in groups for r in group.rollouts)
    depths = {depth for group in groups for depth in leaf_depths(group)}
    assert depths == {1, 2, 3, 4}
    assert sum(map(num_shared_trained, groups)) > 0
    for group in groups:  # where two part, what follows is trained: the agent chose, not the tool
        first = group.rollouts[0]
        for other in group.rollouts[1:]:
            place = common_prefix(first.tokens, other.tokens)
            assert first.loss_mask[place]


def test_the_bundled_file_is_what_the_command_makes(tmp_path):
    """Compared unpacked: another zlib may pack the same text in other bytes."""
    again = tmp_path / "again.jsonl.gz"
    counts = write_rollouts(again, bundled_groups())
    with gzip.open(bundled_rollouts()) as ours, gzip.open(again) as made:
        assert ours.read() == made.read()
    assert counts == {"groups": 8, "rollouts": 53, "tokens": 18_681}  # as lab/data/README.md says
