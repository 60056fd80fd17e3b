"""Orders and programs of plans."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.pipeline.actions import Action
from megatron_prefix.pipeline.planner import backward_order, closings, make_plan
from megatron_prefix.pipeline.simulator import simulate
from megatron_prefix.tree import Forest, TreeOptions, build
from tests.harness.trees import flat_rollouts, random_forest, rollout_sets, tree_options

forests = st.builds(lambda sets, options: build(*sets, options), rollout_sets(), tree_options())


def flat_forest(**options) -> Forest:
    """Two groups of two rollouts: 0 (inner), 1 2 (waves of one), 3 (inner), 4 5."""
    rollouts, groups = flat_rollouts(prefix=6, suffix=2, num=2, num_groups=2)
    return build(rollouts, groups, TreeOptions(**{"min_gain": 0, "wave_tokens": 2, **options}))


@given(forests)
@settings(max_examples=100)
def test_b_order_puts_children_before_parents(forest) -> None:
    order = backward_order(forest.segments)
    assert sorted(order) == list(range(len(forest.segments)))
    place = {index: i for i, index in enumerate(order)}
    for index, segment in enumerate(forest.segments):
        assert segment.parent < index
        if segment.parent >= 0:
            assert place[index] < place[segment.parent]


def test_b_order_keeps_groups_together() -> None:
    assert backward_order(flat_forest().segments) == [1, 2, 0, 4, 5, 3]


def losses(forest: Forest, owner: list[int]) -> list[set[int]]:
    """Per segment the segments whose outputs its losses are made of, by the definition."""
    needs: list[set[int]] = [set() for _ in forest.segments]
    for microbatch in set(owner):
        members = [r for r, mine in enumerate(owner) if mine == microbatch]
        parts = {index for r in members for index, _ in forest.paths[r]}
        for index in parts:
            if forest.segments[index].scored:
                needs[index] |= parts
    return needs


@given(forests, st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_closings_wait_for_the_whole_microbatch(forest, size, rng: random.Random) -> None:
    owner = [rollout // size for rollout in range(len(forest.num_positions))]
    rng.shuffle(owner)
    wanted = [max({i} | need) for i, need in enumerate(losses(forest, owner))]
    assert closings(forest, owner) == wanted


@given(forests)
@settings(max_examples=50)
def test_by_default_a_rollout_is_a_microbatch(forest) -> None:
    assert closings(forest) == closings(forest, range(len(forest.num_positions)))


def test_a_leaf_waits_for_nothing_but_itself() -> None:
    assert closings(flat_forest()) == [0, 1, 2, 3, 4, 5]
    assert closings(flat_forest(), [0, 0, 1, 1]) == [0, 2, 2, 3, 5, 5]


@pytest.mark.parametrize("extra", [1, 2])
@given(forest=forests, num_ranks=st.integers(1, 8))
@settings(max_examples=60)
def test_programs_follow_the_rule(extra, forest, num_ranks) -> None:
    """Before its j-th backward a stage has run what that needs, and `extra` more a stage behind."""
    plan = make_plan(forest, num_ranks, extra=extra)
    order, needed, num = backward_order(forest.segments), closings(forest), len(forest.segments)
    assert plan.num_chunks == 1
    assert plan.segments == forest.segments
    for rank, program in enumerate(plan.programs):
        assert [a for a in program if a.kind == "F"] == [Action("F", i) for i in range(num)]
        assert [a.segment for a in program if a.kind == "B"] == order
        least = 0
        for j, index in enumerate(order):
            least = max(least, needed[index] + 1)
            before = program[: program.index(Action("B", index))]
            assert len(before) - j == min(num, least + extra * (num_ranks - 1 - rank))


def test_a_plan_by_hand() -> None:
    plan = make_plan(flat_forest(), 2, extra=1)
    assert [" ".join(map(str, program)) for program in plan.programs] == [
        "F0 F1 F2 B1 F3 B2 B0 F4 F5 B4 B5 B3",
        "F0 F1 B1 F2 B2 B0 F3 F4 B4 F5 B5 B3",
    ]


def test_an_empty_step_has_empty_programs() -> None:
    assert make_plan(build([]), 3).programs == ((), (), ())


@given(forests, st.integers(1, 8), st.sampled_from([1, 2]), st.integers(1, 5))
@settings(max_examples=150)
def test_plans_of_rollouts_run(forest, num_ranks, extra, size) -> None:
    owner = [rollout // size for rollout in range(len(forest.num_positions))]
    plan = make_plan(forest, num_ranks, microbatches=owner, extra=extra)
    timeline = simulate(plan, needed=closings(forest, owner))
    assert timeline.num_actions == 2 * num_ranks * len(forest.segments)


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_plans_of_random_trees_run(num_ranks) -> None:
    rng = random.Random(num_ranks)
    for _ in range(60):
        forest = random_forest(rng, depth=4)
        owner = [rng.randrange(4) for _ in forest.num_positions]
        for microbatches in (None, owner):
            plan = make_plan(forest, num_ranks, microbatches=microbatches, extra=rng.choice((1, 2)))
            simulate(plan, needed=closings(forest, microbatches))
