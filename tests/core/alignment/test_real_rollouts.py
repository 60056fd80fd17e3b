"""Real rollouts through both schedules: Megatron's on whole sequences is the reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import Group, dense_vocabulary, read_groups
from megatron_prefix.lab.data.shorten import shorten
from megatron_prefix.lab.verify.align import Alignment, align
from megatron_prefix.tree import Pairs, TreeOptions, build
from tests.harness import data
from tests.harness.one_rank import one_rank, small_model

pytestmark = pytest.mark.turns

MAX_TOKENS, MAX_ROLLOUTS = 512, 5


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def short(groups: Sequence[Group]) -> list[Group]:
    """The groups with fewer and shorter rollouts, which still share."""
    found = []
    for group in groups:
        shortened, dropped = shorten(Group(group.name, group.rollouts[:MAX_ROLLOUTS]), MAX_TOKENS)
        assert shortened is not None and dropped == 0
        found.append(shortened)
    return found


def run(
    groups: Sequence[Group],
    config: PrefixConfig,
    *,
    model: str = "tiny-llama",
    dtype: str = "float64",
    recompute: str = "none",
) -> Alignment:
    mapped, vocab, _ = dense_vocabulary(groups)
    chunk = small_model(model, vocab, dtype=dtype, recompute=recompute)
    return align([chunk], mapped, config)


def assert_aligned(verdict: Alignment, limit: float) -> None:
    """Within the numerics policy, within what the project promises, and with something shared."""
    assert verdict.passed, verdict.failures
    assert verdict.grad_max_rel_diff <= min(limit, verdict.tolerance)
    assert 0 < verdict.executed_tokens < verdict.raw_tokens


def test_bundled_rollouts_in_fp64() -> None:
    groups = itertools.islice(read_groups(data.BUNDLED), 3)
    assert_aligned(run(short(list(groups)), PrefixConfig(min_gain=0), model="tiny-qwen3"), 1e-9)


def trie_positions(rollouts: Sequence[Pairs]) -> int:
    """Nodes of a trie over (input, label) pairs, made one pair at a time."""
    nodes: dict[tuple[int, int, int], int] = {}
    for rollout in rollouts:
        node = 0
        for pair in zip(rollout.inputs.tolist(), rollout.labels.tolist(), strict=True):
            node = nodes.setdefault((node, *pair), len(nodes) + 1)
    return len(nodes)


@pytest.mark.parametrize("name", ["gsm8k", "math_cot"])
def test_executed_tokens_are_the_nodes_of_the_tries(name: str) -> None:
    """All groups of a set, with align 1 and nothing dissolved."""
    groups = list(read_groups(data.path(name)))
    rollouts, numbers = pairs_of_groups(groups)
    forest = build(rollouts, numbers, TreeOptions(min_gain=0))
    ends = np.searchsorted(numbers, range(len(groups) + 1))
    tries = [trie_positions(rollouts[a:b]) for a, b in itertools.pairwise(ends)]
    assert forest.executed_tokens == sum(tries)
    assert forest.raw_tokens == sum(len(r) - 1 for group in groups for r in group.rollouts)
    whole = build(rollouts, numbers, TreeOptions(min_gain=0, share="batch"))
    assert whole.executed_tokens == trie_positions(rollouts) < forest.executed_tokens
