"""Orders and programs of plans."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.actions import Action
from megatron_prefix.plan.planner import backward_order, best_plan, loss_ready_after, make_plan
from megatron_prefix.tree import TreeOptions, build
from tests.harness.fuzzing import rounds
from tests.harness.plans import random_case, run
from tests.harness.trees import flat_rollouts, random_forest, rollout_sets, tree_options

forests = st.builds(lambda sets, options: build(*sets, options), rollout_sets(), tree_options())


def flat_forest(**options):
    """Two groups of two rollouts: 0 (inner), 1 2 (waves of one), 3 (inner), 4 5."""
    rollouts, groups = flat_rollouts(prefix=6, suffix=2, num=2, num_groups=2)
    return build(rollouts, groups, TreeOptions(**{"min_gain": 0, "segment_tokens": 2, **options}))


@given(forests, st.integers(1, 8), st.sampled_from([1, 2]))
@settings(max_examples=rounds(30, 500))
def test_all_ranks_follow_the_same_two_orders(forest, num_ranks, run_ahead):
    plan = make_plan(forest, num_ranks, run_ahead=run_ahead)
    order, num = backward_order(forest.segments, loss_ready_after(forest)), len(forest.segments)
    assert (plan.num_ranks, plan.num_chunks, plan.segments) == (num_ranks, 1, forest.segments)
    for program in plan.programs:
        assert [a for a in program if a.kind == "F"] == [Action("F", i) for i in range(num)]
        assert [a for a in program if a.kind == "B"] == [Action("B", i) for i in order]


def test_one_rank_runs_depth_first():
    (program,) = make_plan(flat_forest(), 1).programs
    assert " ".join(map(str, program)) == "F0 F1 B1 F2 B2 B0 F3 F4 B4 F5 B5 B3"


def test_the_best_plan_is_the_shortest_that_holds_no_more():
    """Of three bounds on running ahead, each of which is the only best one for some trees."""
    rng, winners = random.Random(0), set()
    for _ in range(200):
        forest, num_ranks = random_forest(rng, depth=4), rng.randint(2, 6)
        ready_after = loss_ready_after(forest)
        plain = simulate(make_plan(forest, num_ranks), ready_after=ready_after)
        times, most = [plain.makespan], plain.peak_live_positions
        for ahead in (6, None):
            plan = make_plan(forest, num_ranks, run_ahead=ahead, max_live_positions=most)
            tried = simulate(plan, ready_after=ready_after)
            holds_more = tried.peak_live_positions > most
            times.append(math.inf if holds_more else tried.makespan)
        best = simulate(best_plan(forest, num_ranks), ready_after=ready_after)
        assert best.makespan == min(times)
        assert best.peak_live_positions <= most
        if times.count(min(times)) == 1:
            winners.add(times.index(min(times)))
    assert winners == {0, 1, 2}


@given(forests, st.integers(2, 4), st.integers(2, 3), st.sampled_from([None, 1, 2, 5]))
@settings(max_examples=rounds(30, 500))
def test_virtual_stages_follow_megatron_order_and_run(forest, num_ranks, num_chunks, group_size):
    """`group_size` segments a turn of each model chunk, on every rank alike."""
    plan = make_plan(forest, num_ranks, num_chunks=num_chunks, group_size=group_size)
    num, size = len(forest.segments), group_size or num_ranks
    order = backward_order(forest.segments, loss_ready_after(forest))
    for kind, segments, chunks in (
        ("F", list(range(num)), range(num_chunks)),
        ("B", order, reversed(range(num_chunks))),
    ):
        turns = list(chunks)
        wanted = [
            Action(kind, segment, chunk)
            for begin in range(0, num, size)
            for chunk in turns
            for segment in segments[begin : begin + size]
        ]
        for program in plan.programs:
            assert [action for action in program if action.kind == kind] == wanted
    simulate(plan, ready_after=loss_ready_after(forest))


@given(forests, st.integers(1, 4), st.integers(1, 3), st.integers(1, 60), st.sampled_from([1, 3]))
@settings(max_examples=rounds(30, 500))
def test_a_bound_on_live_rows_is_kept_but_for_what_must_be_held(
    forest, num_ranks, num_chunks, rows, run_ahead
):
    """On every rank, Megatron's warm-up of virtual stages included."""
    num_chunks = num_chunks if num_ranks > 1 else 1
    bounded, least = (
        simulate(
            make_plan(forest, num_ranks, num_chunks=num_chunks, **options),
            ready_after=loss_ready_after(forest),
        ).peak_positions
        for options in (dict(run_ahead=run_ahead, max_live_positions=rows), dict(run_ahead=0))
    )
    for peak, needed in zip(bounded, least, strict=True):
        assert peak <= max(rows, needed)


@pytest.mark.parametrize(
    ("n", "stages", "bubble", "peak"), [(16, 4, 0.056, 24576), (8, 8, 0.148, 40960)]
)
def test_bubbles_are_those_of_the_simple_rule_or_less(n, stages, bubble, peak):
    """Four groups, one rollout a wave, prefixes in chunks of a wave; `ruled_plan` with run_ahead 2
    has these bounds."""
    rollouts, groups = flat_rollouts(10240, 2048, n, 4)
    forest = build(rollouts, groups, TreeOptions(chunk_tokens=2048, segment_tokens=2048))
    for planned in (make_plan(forest, stages), best_plan(forest, stages)):
        timeline = simulate(planned, ready_after=loss_ready_after(forest))
        assert round(timeline.bubble_fraction, 3) <= bubble
        assert timeline.peak_live_positions <= peak


# Plans of every kind run: no deadlock, no dependency violated, no bound that stops a rank ---------


@pytest.mark.parametrize("seed", range(2))
def test_random_plans_run(seed):
    rng = random.Random(seed)
    for number in range(100):
        case = random_case(rng)
        timeline = run(case, best=number % 10 == 0)
        chunks = case.options["num_chunks"]
        assert timeline.num_actions == 2 * len(case.forest.segments) * case.num_ranks * chunks
        work = 3 * sum(segment.padded_length for segment in case.forest.segments)
        assert timeline.busy == pytest.approx([work] * case.num_ranks)
