"""Simulated plans: what they cost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.planner import loss_ready_after
from megatron_prefix.plan.walk import token_cost
from megatron_prefix.tree import Forest, Segment, Span, build
from tests.harness.fuzzing import rounds
from tests.harness.trees import (
    flat_forest,
    interleaved,
    rollout_sets,
    ruled_plan,
    tree_options,
    with_programs,
)


def timeline_of(forest: Forest, num_ranks: int, run_ahead: int = 2):
    return simulate(
        ruled_plan(forest, num_ranks, run_ahead=run_ahead), ready_after=loss_ready_after(forest)
    )


# What a plan costs --------------------------------------------------------------------------------


# Four groups, one rollout a wave, F = tokens, B = twice that, by the simple rule of `ruled_plan`;
# the figures come from another simulation: bubbles to a thousandth, peaks exact.
TABLE = [
    # P, R, n, stages, chunk tokens, (bubble, peak) of run_ahead 1, of run_ahead 2
    (10240, 2048, 16, 4, 0, (0.328, 26624), (0.272, 32768)),
    (10240, 2048, 16, 4, 2048, (0.097, 18432), (0.056, 24576)),
    (10240, 2048, 8, 4, 0, (0.441, 26624), (0.376, 32768)),
    (10240, 2048, 8, 4, 2048, (0.148, 18432), (0.088, 24576)),
    (10240, 2048, 8, 8, 0, (0.677, 34816), (0.532, 57344)),
    (10240, 2048, 8, 8, 2048, (0.246, 26624), (0.148, 40960)),
    (8192, 1024, 16, 4, 0, (0.415, 19456), (0.375, 22528)),
    (8192, 1024, 16, 4, 1024, (0.086, 12288), (0.059, 15360)),
]


@pytest.mark.parametrize(("p", "r", "n", "stages", "chunk", "one", "two"), TABLE)
def test_bubbles_of_the_simple_rule(p, r, n, stages, chunk, one, two) -> None:
    forest = flat_forest(p, r, n, 4, chunk_tokens=chunk)
    for run_ahead, (bubble, peak) in ((1, one), (2, two)):
        timeline = timeline_of(forest, stages, run_ahead)
        assert round(timeline.bubble_fraction, 3) == bubble
        assert timeline.peak_live_positions == peak


def test_a_timeline_by_hand() -> None:
    """Two stages; F0 4, F1 2, F2 2 tokens, backwards twice that."""
    plan = ruled_plan(flat_forest(), 2, run_ahead=1)
    timeline = simulate(plan)
    wanted = [
        [("F0", 0, 4), ("F1", 4, 6), ("F2", 6, 8), ("B1", 10, 14), ("B2", 16, 20), ("B0", 28, 36)],
        [
            ("F0", 4, 8),
            ("F1", 8, 10),
            ("B1", 10, 14),
            ("F2", 14, 16),
            ("B2", 16, 20),
            ("B0", 20, 28),
        ],
    ]
    # B1 of rank 1 ends at 14, so rank 0 begins it there.
    wanted[0][3], wanted[0][4] = ("B1", 14, 18), ("B2", 20, 24)
    found = [
        [(str(e.action), e.start, e.end) for e in timeline.events if e.rank == rank]
        for rank in (0, 1)
    ]
    assert found == wanted
    assert timeline.makespan == 36
    assert timeline.busy == (24, 24)
    assert timeline.bubble_fractions == (1 - 24 / 36, 1 - 24 / 36)
    assert timeline.peak_positions == (8, 6)
    assert timeline.peak_live_positions == 8
    assert (timeline.num_actions, timeline.num_ranks, timeline.unit) == (12, 2, "tokens")


def test_one_rank_never_waits() -> None:
    timeline = timeline_of(flat_forest(num=5, num_groups=3), 1)
    assert timeline.bubble_fraction == 0
    assert timeline.makespan == 3 * flat_forest(num=5, num_groups=3).executed_tokens


def test_half_rows_are_rounded_up() -> None:
    """Three halves: two segments of one row on the first of two model chunks, one on the second."""
    rows = tuple((Span(0, 1, 1, (rollout,)),) for rollout in (0, 1))
    segments = tuple(Segment(row, inner=False, scored=True) for row in rows)
    program = ["F0", "F0.1", "F1", "B0.1", "B0", "F1.1", "B1.1", "B1"]
    assert simulate(with_programs(Plan(segments, (), 2), [program])).peak_positions == (2,)


def test_an_empty_plan_takes_no_time() -> None:
    timeline = simulate(ruled_plan(build([]), 3))
    assert (timeline.makespan, timeline.bubble_fraction, timeline.peak_positions) == (
        0,
        0,
        (0, 0, 0),
    )


def test_padding_costs_and_another_cost_may_be_given() -> None:
    forest = flat_forest(prefix=4, suffix=3, multiple=4, segment_tokens=0)
    assert [s.padded_length for s in forest.segments] == [4, 8]
    assert simulate(ruled_plan(forest)).makespan == 3 * 12
    assert simulate(ruled_plan(forest), cost=lambda segment, kind: 1.5).makespan == 6.0


@pytest.mark.parametrize(("num_ranks", "num_chunks"), [(2, 2), (4, 3), (1, 2)])
def test_virtual_stages(num_ranks, num_chunks) -> None:
    forest = flat_forest(num=4, num_groups=2)
    timeline = simulate(
        interleaved(forest, num_ranks, num_chunks), ready_after=loss_ready_after(forest)
    )
    work = 3 * forest.executed_tokens
    assert timeline.busy == pytest.approx([work] * num_ranks)
    # Everything is live before the first backward; a row on one of v chunks counts 1/v.
    assert timeline.peak_positions == (forest.executed_tokens,) * num_ranks
    first = {e.rank: e for e in reversed(timeline.events)}
    shares = [forest.segments[0].padded_length / num_chunks * rank for rank in range(num_ranks)]
    assert [first[rank].start for rank in range(num_ranks)] == pytest.approx(shares)


@given(rollout_sets(), tree_options(), st.integers(1, 6), st.sampled_from([1, 2]))
@settings(max_examples=rounds(50, 500))
def test_a_timeline_keeps_every_dependency(sets, options, num_ranks, run_ahead) -> None:
    forest = build(*sets, options)
    plan = ruled_plan(forest, num_ranks, run_ahead=run_ahead)
    timeline = simulate(plan)
    at = {(e.rank, str(e.action)): e for e in timeline.events}
    clock = [0.0] * num_ranks
    for event in timeline.events:
        rank, (kind, index, *_) = event.rank, event.action
        assert event.start >= clock[rank]
        assert event.end - event.start == token_cost(forest.segments[index], kind)
        source = rank - 1 if kind == "F" else rank + 1
        arrival = at[source, str(event.action)].end if 0 <= source < num_ranks else 0.0
        assert event.start == max(clock[rank], arrival)
        clock[rank] = event.end
    assert timeline.makespan == max(clock)
    for rank in range(num_ranks):
        live = peak = 0
        for action in plan.programs[rank]:
            live += forest.segments[action.segment].padded_length * (
                1 if action.kind == "F" else -1
            )
            peak = max(peak, live)
        assert (timeline.peak_positions[rank], live) == (peak, 0)


def test_ranks_may_take_different_times() -> None:
    """As the last stage does, which has the output layer."""
    forest = flat_forest(num_groups=2)
    plan = ruled_plan(forest, 2)
    slow = simulate(plan, action_time=lambda action, rank: 1.0 + rank)
    assert slow.busy == (len(plan.programs[0]), 2 * len(plan.programs[1]))
    for event in slow.events:
        assert event.end - event.start == 1.0 + event.rank
    alike = simulate(plan, action_time=lambda action, rank: 2.0)
    assert alike == simulate(plan, cost=lambda segment, kind: 2.0)
