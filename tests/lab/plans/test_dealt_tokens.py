"""Tokens that ranks execute of a dealt step, against tries that are counted one by one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.data.generate import TREES, generate
from megatron_prefix.lab.data.pairs import pairs_of
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.plans.dealing import DEALS, deal
from megatron_prefix.lab.plans.dealt_tokens import DealtTokens, dealt_tokens
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.tree import TreeOptions
from tests.harness.trees import trie_size

SPEC = resolve("tiny-llama").with_vocab(64)


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
