"""What the first positions say of sharing, against the tree."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.tree import Pairs, TreeOptions, beginnings, build
from megatron_prefix.tree.beginnings import most_saved
from tests.harness.fuzzing import rounds
from tests.harness.trees import flat_rollouts, rollout_sets, tree_options, with_routes


@pytest.mark.parametrize("look", [1, 4, 16, 512])
@given(rollout_sets(), tree_options())
@settings(max_examples=rounds(50, 500))
def test_no_tree_saves_more(look, sets, options) -> None:
    forest = build(*sets, options)
    with mock.patch.object(beginnings, "LONGEST_LOOK", look):
        assert forest.raw_tokens - forest.executed_tokens <= most_saved(sets[0], options)


@given(rollout_sets(), tree_options(), st.data())
@settings(max_examples=rounds(25, 500))
def test_routes_only_take_sharing_away(sets, options, data) -> None:
    rollouts, groups = sets
    parts = [data.draw(st.integers(0, len(rollout))) for rollout in rollouts]
    routed = with_routes(rollouts, 2, 4, parts)
    forest = build(routed, groups, options)
    assert forest.raw_tokens - forest.executed_tokens <= most_saved(routed, options)


@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("min_gain", [0, 64])
def test_nothing_is_shared_where_nobody_begins_alike(align, min_gain) -> None:
    rollouts, _ = flat_rollouts(40, 10, 1, 20)
    for number, rollout in enumerate(rollouts):
        rollout.inputs[0] = number
    assert most_saved(rollouts, TreeOptions(multiple=align, min_gain=min_gain, share="batch")) == 0


def test_a_common_first_token_is_little() -> None:
    """Two pairs begin ten rollouts each; the bound is those pairs and not the rollouts."""
    rollouts, _ = flat_rollouts(40, 10, 1, 20)
    for number, rollout in enumerate(rollouts):
        rollout.inputs[0], rollout.labels[:2] = 7, (number % 2, number)  # one array underneath
    options = TreeOptions(min_gain=0, share="batch")
    forest = build(rollouts, None, options)
    assert forest.raw_tokens - forest.executed_tokens == most_saved(rollouts, options) == 18
    assert most_saved(rollouts, replace(options, min_gain=10)) == 0  # 9 of each of the two pairs


@pytest.mark.parametrize("num", [2, 8])
def test_few_copies_of_a_short_prompt_are_dissolved(num) -> None:
    """A span of 9 positions under 64 wanted: two copies save too little, eight could do."""
    rollouts, _ = flat_rollouts(8, 30, num, 1)
    options = TreeOptions(min_gain=20, share="batch")
    assert bool(most_saved(rollouts, options)) == (num == 8)


def test_equal_rollouts_are_shared_however_short() -> None:
    pair = Pairs(np.array([1]), np.array([2]), np.array([True]))
    options = TreeOptions(multiple=8, min_gain=64, share="batch")
    assert (
        most_saved([pair] * 3, options) == 2 == 3 - build([pair] * 3, None, options).executed_tokens
    )
    assert most_saved([], options) == 0


def test_a_type_of_numbers_does_not_matter() -> None:
    (one, *_), _ = flat_rollouts(40, 10, 1, 1)
    other = replace(one, inputs=one.inputs.astype(np.int32))
    assert most_saved([one, other], TreeOptions()) >= len(one)
