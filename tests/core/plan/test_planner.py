"""Orders and programs of plans."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.lab.plans.timeline import Timeline, simulate
from megatron_prefix.plan.actions import Action
from megatron_prefix.plan.planner import (
    backward_order,
    best_plan,
    chunk_turns,
    loss_ready_after,
    make_plan,
)
from megatron_prefix.tree import Forest, TreeOptions, build
from tests.harness.fuzzing import rounds
from tests.harness.trees import (
    flat_rollouts,
    random_forest,
    rollout_sets,
    tree_options,
)

forests = st.builds(lambda sets, options: build(*sets, options), rollout_sets(), tree_options())


def flat_forest(**options) -> Forest:
    """Two groups of two rollouts: 0 (inner), 1 2 (waves of one), 3 (inner), 4 5."""
    rollouts, groups = flat_rollouts(prefix=6, suffix=2, num=2, num_groups=2)
    return build(rollouts, groups, TreeOptions(**{"min_gain": 0, "segment_tokens": 2, **options}))


@given(st.one_of(forests, st.builds(random_forest, st.randoms(use_true_random=True))))
@settings(max_examples=rounds(50, 500))
def test_b_order_has_waves_in_f_order_and_inner_ones_early(forest) -> None:
    segments, order = forest.segments, backward_order(forest.segments)
    waves = [index for index in order if not segments[index].inner]
    assert waves == sorted(waves)
    done: set[int] = set()
    for index in order:
        if not segments[index].inner:  # nothing else could have come before it
            for other, inner in enumerate(s.inner for s in segments):
                if inner and other not in done:
                    assert any(other in s.parents for n, s in enumerate(segments) if n not in done)
        done.add(index)


def test_b_order_keeps_groups_together() -> None:
    assert backward_order(flat_forest().segments) == [1, 2, 0, 4, 5, 3]


def losses(forest: Forest, microbatch_of: list[int]) -> list[set[int]]:
    """Per segment the segments whose outputs its losses are made of, by the definition."""
    needs: list[set[int]] = [set() for _ in forest.segments]
    for microbatch in set(microbatch_of):
        members = [r for r, mine in enumerate(microbatch_of) if mine == microbatch]
        parts = {index for r in members for index, _ in forest.paths[r]}
        for index in parts:
            if forest.segments[index].scored:
                needs[index] |= parts
    return needs


@given(forests, st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=rounds(50, 500))
def test_closings_wait_for_the_whole_microbatch(forest, size, rng: random.Random) -> None:
    microbatch_of = [rollout // size for rollout in range(len(forest.num_positions))]
    rng.shuffle(microbatch_of)
    wanted = [max({i} | need) for i, need in enumerate(losses(forest, microbatch_of))]
    assert loss_ready_after(forest, microbatch_of) == wanted
    each = list(range(len(microbatch_of)))
    assert loss_ready_after(forest) == loss_ready_after(forest, each)


@given(forests, st.integers(1, 8), st.sampled_from([1, 2]))
@settings(max_examples=rounds(50, 500))
def test_all_ranks_follow_the_same_two_orders(forest, num_ranks, run_ahead) -> None:
    plan = make_plan(forest, num_ranks, run_ahead=run_ahead)
    order, num = backward_order(forest.segments, loss_ready_after(forest)), len(forest.segments)
    assert (plan.num_ranks, plan.num_chunks, plan.segments) == (num_ranks, 1, forest.segments)
    for program in plan.programs:
        assert [a for a in program if a.kind == "F"] == [Action("F", i) for i in range(num)]
        assert [a for a in program if a.kind == "B"] == [Action("B", i) for i in order]


@given(forests, st.integers(1, 8), st.sampled_from([1, 2]))
@settings(max_examples=rounds(50, 500))
def test_a_stage_runs_no_further_ahead_than_allowed(forest, num_ranks, run_ahead) -> None:
    """At most what its next backward needs, and `run_ahead` more for each stage behind it."""
    plan = make_plan(forest, num_ranks, run_ahead=run_ahead)
    ready_after = loss_ready_after(forest)
    for rank, program in enumerate(plan.programs):
        forwards = least = 0
        for action in program:
            if action.kind == "F":
                forwards += 1
                continue
            least = max(least, ready_after[action.segment] + 1)
            if rank == num_ranks - 1:
                assert forwards >= least
            assert forwards <= least + run_ahead * (num_ranks - 1 - rank)


def test_one_rank_runs_depth_first() -> None:
    (program,) = make_plan(flat_forest(), 1).programs
    assert " ".join(map(str, program)) == "F0 F1 B1 F2 B2 B0 F3 F4 B4 F5 B5 B3"


# Four groups, one rollout a wave, prefixes in chunks of a wave. Bubble and peak of the simple rule
# (`ruled_plan`) with run_ahead 2 are bounds.
@pytest.mark.parametrize(
    ("p", "r", "n", "stages", "bubble", "peak"),
    [
        (10240, 2048, 16, 4, 0.056, 24576),
        (10240, 2048, 8, 4, 0.088, 24576),
        (10240, 2048, 8, 8, 0.148, 40960),
        (8192, 1024, 16, 4, 0.059, 15360),
    ],
)
def test_bubbles_are_those_of_the_simple_rule_or_less(p, r, n, stages, bubble, peak) -> None:
    rollouts, groups = flat_rollouts(p, r, n, 4)
    forest = build(rollouts, groups, TreeOptions(chunk_tokens=r, segment_tokens=r))
    for planned in (make_plan(forest, stages), best_plan(forest, stages)):
        timeline = simulate(planned, ready_after=loss_ready_after(forest))
        assert round(timeline.bubble_fraction, 3) <= bubble
        assert timeline.peak_live_positions <= peak


def longest_wait(timeline: Timeline) -> float:
    """The longest time that a rank waits before any of its actions."""
    waits = [0.0]
    for rank in range(timeline.num_ranks):
        mine = [event for event in timeline.events if event.rank == rank]
        ends = [0.0, *(event.end for event in mine)]
        waits += [event.start - end for event, end in zip(mine, ends, strict=False)]
    return max(waits)


@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_no_stage_waits_for_a_prompt_sixteen_times_a_wave(stages, num_groups) -> None:
    """In chunks of a wave, no longer than equal microbatches make a stage wait anyway."""
    wave, prompt = 64, 16 * 64
    rollouts, groups = flat_rollouts(prompt, wave, 8, num_groups)
    waits = []
    for chunk_tokens in (0, wave):
        forest = build(
            rollouts, groups, TreeOptions(chunk_tokens=chunk_tokens, segment_tokens=wave)
        )
        waits.append(
            longest_wait(simulate(best_plan(forest, stages), ready_after=loss_ready_after(forest)))
        )
    whole, chunked = waits
    assert chunked <= 3 * wave * (stages - 1)  # forward and backward through the others
    assert whole > prompt


def test_an_empty_step_has_empty_programs() -> None:
    assert make_plan(build([]), 3).programs == ((), (), ())


def test_the_best_plan_is_the_shortest_that_holds_no_more() -> None:
    """Of three bounds on running ahead, each of which is the only best one for some trees."""
    rng, winners = random.Random(0), set()
    for _ in range(200):
        forest, num_ranks = random_forest(rng, depth=4), rng.randint(2, 6)
        ready_after = loss_ready_after(forest)
        plain = simulate(make_plan(forest, num_ranks), ready_after=ready_after)
        times = [plain.makespan]
        for ahead in (6, None):
            plan = make_plan(
                forest, num_ranks, run_ahead=ahead, max_live_positions=plain.peak_live_positions
            )
            tried = simulate(plan, ready_after=ready_after)
            holds_more = tried.peak_live_positions > plain.peak_live_positions
            times.append(math.inf if holds_more else tried.makespan)
        best = simulate(best_plan(forest, num_ranks), ready_after=ready_after)
        assert best.makespan == min(times)
        assert best.peak_live_positions <= plain.peak_live_positions
        if times.count(min(times)) == 1:
            winners.add(times.index(min(times)))
    assert winners == {0, 1, 2}


@pytest.mark.parametrize("num_chunks", [2, 3])
def test_virtual_stages_wait_less(num_chunks) -> None:
    rollouts, groups = flat_rollouts(10240, 2048, 8, 4)
    forest = build(rollouts, groups, TreeOptions(chunk_tokens=2048, segment_tokens=2048))
    plain = simulate(best_plan(forest, 4))
    virtual = simulate(best_plan(forest, 4, num_chunks=num_chunks))
    assert virtual.bubble_fraction < plain.bubble_fraction / num_chunks * 1.2
    assert virtual.peak_live_positions <= plain.peak_live_positions


@given(forests, st.integers(2, 4), st.integers(2, 3), st.sampled_from([None, 1, 2, 5]))
@settings(max_examples=rounds(50, 500))
def test_virtual_stages_follow_megatron_order_and_run(
    forest, num_ranks, num_chunks, group_size
) -> None:
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
@settings(max_examples=rounds(50, 500))
def test_a_bound_on_live_rows_is_kept_but_for_what_must_be_held(
    forest, num_ranks, num_chunks, rows, run_ahead
) -> None:
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


@given(forests, st.integers(2, 4), st.integers(1, 3))
@settings(max_examples=rounds(30, 500))
def test_without_running_ahead_only_what_is_needed_runs(forest, num_ranks, num_chunks) -> None:
    plan = make_plan(forest, num_ranks, num_chunks=num_chunks, run_ahead=0)
    size = num_ranks if num_chunks > 1 else 1
    items = chunk_turns(range(len(forest.segments)), range(num_chunks), size)
    place = {item: number for number, item in enumerate(items)}
    ready_after, last = loss_ready_after(forest), num_chunks - 1
    for program in plan.programs:
        forwards = least = 0
        for action in program:
            if action.kind == "F":
                forwards += 1
                continue
            least = max(least, place[ready_after[action.segment], last] + 1)
            assert forwards <= least


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
def test_plans_of_random_trees_run(num_ranks) -> None:
    rng = random.Random(num_ranks)
    for _ in range(60):
        forest = random_forest(rng, depth=4)
        microbatch_of = [rng.randrange(4) for _ in forest.num_positions]
        for microbatches in (None, microbatch_of):
            plan = make_plan(
                forest, num_ranks, microbatches=microbatches, run_ahead=rng.choice((1, 2))
            )
            simulate(plan, ready_after=loss_ready_after(forest, microbatches))
