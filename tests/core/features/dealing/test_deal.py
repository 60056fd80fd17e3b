"""Rollouts dealt to ranks: each once, whole groups, balanced by what ranks run."""

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_prefix.errors import UserError
from megatron_prefix.features.dealing.deal import DealtCosts, cost_of_length, deal
from megatron_prefix.lab.plans.dealing import balanced_parts


class Step(NamedTuple):
    """The arguments of `deal`."""

    groups: list[str]
    costs: list[float]
    shared: list[float]

    def first(self, num):
        return Step(*(column[:num] for column in self))


def loads(step, ranks):
    """What every rank runs, counted rollout by rollout."""
    found = []
    for part in ranks:
        begun = {}
        for number in part:
            name = step.groups[number]
            siblings = [s for g, s in zip(step.groups, step.shared, strict=True) if g == name]
            begun[name] = min(siblings)
        own = (step.costs[number] - begun[step.groups[number]] for number in part)
        found.append(sum(begun.values()) + sum(own))
    return found


@st.composite
def steps(draw):
    """Groups of any sizes, in any order, with beginnings of any length."""
    lengths = [
        (f"g{number}", prompt, prompt + answer)
        for number in range(draw(st.integers(0, 8)))
        for prompt in [draw(st.integers(0, 400))]
        for answer in draw(st.lists(st.integers(1, 400), min_size=1, max_size=8))
    ]
    rows = draw(st.permutations(lengths))
    quadratic = draw(st.sampled_from([0.0, 0.001]))
    return Step(
        [name for name, _, _ in rows],
        [cost_of_length(length, quadratic) for _, _, length in rows],
        [cost_of_length(prompt, quadratic) for _, prompt, _ in rows],
    )


def drawn(seed, num_groups, size, prompt, answer):
    """Groups with log-normal lengths, as responses have."""
    rng = np.random.default_rng(seed)
    prompts = rng.lognormal(math.log(prompt), 0.5, num_groups).astype(int) + 1
    shared = np.repeat(prompts, size).astype(float)
    costs = shared + rng.lognormal(math.log(answer), 0.8, num_groups * size).astype(int) + 1
    names = [f"g{number}" for number in range(num_groups) for _ in range(size)]
    return Step(names, costs.tolist(), shared.tolist())


@given(steps(), st.integers(1, 6))
def test_each_rollout_is_on_one_rank_and_loads_are_near_the_mean(step, num):
    ranks = deal(*step, num)
    assert len(ranks) == num
    assert sorted(number for part in ranks for number in part) == list(range(len(step.groups)))
    assert ranks == deal(*step, num)
    found = loads(step, ranks)
    assert [DealtCosts.of(*step).load(part) for part in ranks] == pytest.approx(found)
    assert max(found) <= 1.1 * sum(found) / num + max(step.costs, default=0) + 1e-6


@given(steps(), st.integers(1, 6))
def test_ranks_get_equally_many_and_run_no_more_than_by_length(step, num):
    step = step.first(len(step.groups) // num * num)
    ranks = deal(*step, num, equal=True)
    assert {len(part) for part in ranks} == {len(step.groups) // num}
    assert sorted(number for part in ranks for number in part) == list(range(len(step.groups)))
    lengths = [round(cost) for cost in step.costs]
    by_length = loads(step, balanced_parts(lengths, num))
    assert max(loads(step, ranks)) <= max(by_length) + max(step.costs, default=0) / 2 + 1


@given(steps(), st.integers(1, 6))
def test_siblings_are_side_by_side_in_the_order_given(step, num):
    for part in deal(*step, num):
        names = [step.groups[number] for number in part]
        assert len(set(names)) == sum(a != b for a, b in zip(names, [None, *names], strict=False))
        assert part == sorted(
            part, key=lambda number: (step.groups.index(step.groups[number]), number)
        )


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("num", [2, 8, 16])
@pytest.mark.parametrize(("prompt", "answer"), [(2000, 100), (500, 500), (100, 1000)])
def test_ranks_run_less_than_by_length(equal, num, prompt, answer):
    """As verl deals; 64 groups of 8: prompts that are long, alike, and short."""
    for seed in range(3):
        step = drawn(seed, 64, 8, prompt, answer)
        found = loads(step, deal(*step, num, equal=equal))
        by_length = loads(step, balanced_parts([int(cost) for cost in step.costs], num))
        assert max(found) < 1.1 * sum(found) / num
        # Executed once or on every rank: what is to be had grows with prompts and ranks.
        assert max(found) < {100: 0.99, 500: 0.92, 2000: 0.75}[prompt] * max(by_length)


def test_a_group_stays_whole_where_splitting_repeats_more():
    """A beginning of 1,000 and answers of 1: a second rank would save a few of 1,008."""
    step = Step(["a"] * 8 + ["b"] * 8, [1001.0] * 16, [1000.0] * 16)
    assert sorted(loads(step, deal(*step, 2))) == [1008, 1008]


def test_wrong_numbers_are_refused():
    with pytest.raises(UserError, match="0 ranks to deal rollouts to: give 1 or more"):
        deal(["a"], [1.0], [0.0], 0)
    with pytest.raises(UserError, match="3 rollouts, equally many for each of 2 ranks"):
        deal([*"aab"], [1.0] * 3, [0.0] * 3, 2, equal=True)
    assert deal([], [], [], 2) == [[], []]
