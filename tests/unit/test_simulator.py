"""Simulated plans: what they cost, and which are refused."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.errors import UserError
from megatron_prefix.pipeline.actions import Action, Plan
from megatron_prefix.pipeline.check import PlanError, check, check_segments
from megatron_prefix.pipeline.grid import marked_grid
from megatron_prefix.pipeline.planner import closings
from megatron_prefix.pipeline.simulator import simulate, token_cost
from megatron_prefix.tree import Forest, Row, Segment, TreeOptions, build
from tests.harness.trees import (
    cells,
    flat_rollouts,
    random_forest,
    rollout_sets,
    ruled_plan,
    tree_options,
    with_programs,
)


def flat_forest(prefix=4, suffix=2, num=2, num_groups=1, **options) -> Forest:
    """Flat groups, one rollout a wave."""
    rollouts, groups = flat_rollouts(prefix, suffix, num, num_groups)
    given = {"min_gain": 0, "wave_tokens": suffix, **options}
    return build(rollouts, groups, TreeOptions(**given))


def timeline_of(forest: Forest, num_ranks: int, extra: int = 2):
    return simulate(ruled_plan(forest, num_ranks, extra=extra), needed=closings(forest))


# What a plan costs --------------------------------------------------------------------------------


# The cases of the table in design section 2 (four groups, one rollout a wave, F = tokens, B = twice
# that), with the digits of the design's own simulation, which that table rounds further: bubbles to
# a thousandth, peaks exact.
TABLE = [
    # P, R, n, stages, chunk tokens, (bubble, peak) of extra 1, of extra 2
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
def test_bubbles_of_the_design(p, r, n, stages, chunk, one, two) -> None:
    forest = flat_forest(p, r, n, 4, chunk_tokens=chunk)
    for extra, (bubble, peak) in ((1, one), (2, two)):
        timeline = timeline_of(forest, stages, extra)
        assert round(timeline.bubble_fraction, 3) == bubble
        assert timeline.peak_live_rows == peak


def test_a_timeline_by_hand() -> None:
    """Two stages; F0 4, F1 2, F2 2 tokens, backwards twice that."""
    plan = ruled_plan(flat_forest(), 2, extra=1)
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
    assert timeline.peak_rows == (8, 6)
    assert timeline.peak_live_rows == 8
    assert timeline.peak_bytes(10) == (80, 60)
    assert (timeline.num_actions, timeline.num_ranks, timeline.unit) == (12, 2, "tokens")


def test_one_rank_never_waits() -> None:
    timeline = timeline_of(flat_forest(num=5, num_groups=3), 1)
    assert timeline.bubble_fraction == 0
    assert timeline.makespan == 3 * flat_forest(num=5, num_groups=3).executed_tokens


def test_half_rows_are_rounded_up() -> None:
    """Three halves: two segments of one row on the first of two model chunks, one on the second."""
    rows = tuple((Row(0, 1, 1, (rollout,)),) for rollout in (0, 1))
    segments = tuple(Segment(-1, 0, row, False, False, True) for row in rows)
    program = ["F0", "F0.1", "F1", "B0.1", "B0", "F1.1", "B1.1", "B1"]
    assert simulate(with_programs(Plan(segments, (), 2), [program])).peak_rows == (2,)


def test_an_empty_plan_takes_no_time() -> None:
    timeline = simulate(ruled_plan(build([]), 3))
    assert (timeline.makespan, timeline.bubble_fraction, timeline.peak_rows) == (0, 0, (0, 0, 0))


def test_padding_costs_and_another_cost_may_be_given() -> None:
    forest = flat_forest(prefix=4, suffix=3, align=4, wave_tokens=0)
    assert [s.num_rows for s in forest.segments] == [4, 8]
    assert simulate(ruled_plan(forest)).makespan == 3 * 12
    timeline = simulate(ruled_plan(forest), cost=lambda segment, kind: 1.5, unit="ms")
    assert (timeline.makespan, timeline.unit) == (6.0, "ms")


def interleaved(forest: Forest, num_ranks: int, num_chunks: int) -> Plan:
    """All forwards, then all backwards: a valid plan for virtual stages."""
    backwards = [a.segment for a in ruled_plan(forest).programs[0] if a.kind == "B"]
    program = [
        Action("F", i, chunk) for chunk in range(num_chunks) for i in range(len(forest.segments))
    ]
    program += [Action("B", i, chunk) for chunk in reversed(range(num_chunks)) for i in backwards]
    return Plan(forest.segments, (tuple(program),) * num_ranks, num_chunks)


@pytest.mark.parametrize(("num_ranks", "num_chunks"), [(2, 2), (4, 3), (1, 2)])
def test_virtual_stages(num_ranks, num_chunks) -> None:
    forest = flat_forest(num=4, num_groups=2)
    timeline = simulate(interleaved(forest, num_ranks, num_chunks), needed=closings(forest))
    work = 3 * forest.executed_tokens
    assert timeline.busy == pytest.approx([work] * num_ranks)
    # Everything is live before the first backward; a row on one of v chunks counts 1/v.
    assert timeline.peak_rows == (forest.executed_tokens,) * num_ranks
    first = {e.rank: e for e in reversed(timeline.events)}
    shares = [forest.segments[0].num_rows / num_chunks * rank for rank in range(num_ranks)]
    assert [first[rank].start for rank in range(num_ranks)] == pytest.approx(shares)


@given(rollout_sets(), tree_options(), st.integers(1, 6), st.sampled_from([1, 2]))
@settings(max_examples=100)
def test_a_timeline_keeps_every_dependency(sets, options, num_ranks, extra) -> None:
    forest = build(*sets, options)
    plan = ruled_plan(forest, num_ranks, extra=extra)
    timeline = simulate(plan)
    at = {(e.rank, str(e.action)): e for e in timeline.events}
    clock = [0.0] * num_ranks
    for event in timeline.events:
        rank, (kind, index, _) = event.rank, event.action
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
            live += forest.segments[action.segment].num_rows * (1 if action.kind == "F" else -1)
            peak = max(peak, live)
        assert (timeline.peak_rows[rank], live) == (peak, 0)


# What is refused ----------------------------------------------------------------------------------


def refused(plan: Plan, needed=None) -> PlanError:
    with pytest.raises(PlanError) as caught:
        simulate(plan, needed=needed)
    error = caught.value
    assert isinstance(error, UserError)
    lines = str(error).splitlines()
    assert lines[1:] == error.grid.splitlines()
    longest = max(map(len, plan.programs))
    assert len(error.grid.splitlines()) in (longest + 1, longest + 2)  # heading, and a missing cell
    return error


def headline(error: PlanError) -> str:
    return str(error).splitlines()[0]


def marked_cells(error: PlanError) -> list[str]:
    """The words that stand between > and < in the grid."""
    return [
        word[1:-1] for line in error.grid.splitlines() for word in line.split() if word[0] == ">"
    ]


def changed(rank: int, edit, num_ranks: int = 2) -> Plan:
    """A valid plan with one rank's cells edited; rank 1's begin F0 F1 B1 F2 B2 B0."""
    plan = ruled_plan(flat_forest(), num_ranks, extra=1)
    programs = cells(plan)
    edit(programs[rank])
    return with_programs(plan, programs)


def test_a_missing_action() -> None:
    error = refused(changed(1, lambda cells: cells.remove("B2")))
    assert headline(error) == "rank 1, place 4: B0 runs before the backward of its child 2"
    error = refused(changed(0, lambda cells: cells.remove("B0")))
    assert headline(error) == "rank 0 never runs B0"
    assert (error.marked, marked_cells(error)) == (((0, 5),), ["end"])
    error = refused(changed(1, lambda cells: [cells.remove("F2"), cells.remove("B2")]))
    assert headline(error) == "rank 1, place 3: B0 runs before the backward of its child 2"


def test_a_missing_leaf_without_parent() -> None:
    forest = flat_forest(prefix=4, suffix=2, min_gain=100, wave_tokens=6)
    plan = with_programs(ruled_plan(forest), [["F0", "B0"]])
    error = refused(plan)
    assert (headline(error), error.marked) == ("rank 0 never runs F1", ((0, 2),))


def test_a_doubled_action() -> None:
    for cell in ("F1", "B1"):
        error = refused(changed(1, lambda cells, cell=cell: cells.insert(5, cell)))
        assert headline(error) == f"rank 1, place 5: {cell} runs a second time"
        assert (error.marked, marked_cells(error)) == (((1, 5),), [cell])


def test_a_backward_before_its_forward() -> None:
    error = refused(changed(1, lambda cells: cells.insert(1, cells.pop(2))))
    assert headline(error) == "rank 1, place 1: B1 runs before its own forward"


def test_a_child_before_its_parent() -> None:
    error = refused(changed(1, lambda cells: cells.insert(0, cells.pop(1))))
    assert headline(error) == "rank 1, place 0: F1 runs before the forward of its parent 0"
    assert marked_cells(error) == ["F1"]


def test_a_parent_before_its_child_backward() -> None:
    error = refused(changed(0, lambda cells: cells.insert(4, cells.pop(5))))
    assert headline(error) == "rank 0, place 4: B0 runs before the backward of its child 2"
    assert marked_cells(error) == ["B0"]


def test_what_does_not_exist() -> None:
    for cell in ("F9", "F0.1"):
        error = refused(changed(0, lambda cells, cell=cell: cells.insert(2, cell)))
        assert headline(error).startswith(f"rank 0, place 2: {cell} does not exist")
        assert marked_cells(error) == [cell]
    plan = ruled_plan(flat_forest())
    odd = Plan(plan.segments, ((*plan.programs[0], Action("W", 0)),))
    assert "W0 does not exist" in headline(refused(odd))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_neighbours_that_disagree_on_the_order(rank) -> None:
    plan = ruled_plan(flat_forest(num=4), 3, extra=1)
    programs = cells(plan)
    a, b = programs[rank].index("F2"), programs[rank].index("F3")
    programs[rank][a], programs[rank][b] = "F3", "F2"
    if a < programs[rank].index("B2") < b:
        programs[rank].remove("B2")
        programs[rank].insert(b, "B2")
    error = refused(with_programs(plan, programs))
    receiver = max(rank, 1)
    sends = "F3" if rank == 0 else "F2"
    assert f"takes message 2 from rank {receiver - 1}" in headline(error)
    assert headline(error).startswith(f"rank {receiver}, place")
    assert f"sends the one for {sends} there" in headline(error)
    assert error.marked[0][0] == receiver


def test_neighbours_that_disagree_on_backwards() -> None:
    error = refused(changed(1, lambda c: c.__setitem__(slice(2, 5), ["F2", "B2", "B1"])))
    assert headline(error) == (
        "rank 0, place 3: B1 takes message 0 from rank 1, which sends the one for B2 there"
    )


def test_a_deadlock() -> None:
    """Rank 0 wants B0 before it sends F1; rank 1 wants F1 before it runs B0."""
    segments = flat_forest(prefix=4, suffix=2, min_gain=100).segments
    plan = Plan(segments, ((), ()))
    plan = with_programs(plan, [["F0", "B0", "F1", "B1"], ["F0", "F1", "B0", "B1"]])
    error = refused(plan)
    assert headline(error).startswith("deadlock: rank 0 at B0 for rank 1, rank 1 at F1 for rank 0")
    assert error.marked == ((0, 1), (1, 1))
    assert marked_cells(error) == ["B0", "F1"]
    check(plan)  # nothing but the play finds it


def test_a_loss_that_does_not_exist_yet() -> None:
    """Both rollouts are one microbatch: no backward of a wave before the forwards of both."""
    forest = flat_forest()
    plan = ruled_plan(forest, 2, extra=1)
    simulate(plan, needed=closings(forest))
    needed = closings(forest, [0, 0])
    error = refused(plan, needed)
    assert headline(error) == "rank 1, place 2: B1 needs a loss that takes all forwards up to F2"
    simulate(ruled_plan(forest, 2, microbatches=[0, 0]), needed=needed)


def test_virtual_stages_that_disagree() -> None:
    plan = interleaved(flat_forest(), 2, 2)
    programs = cells(plan)
    for program in programs:
        program[4], program[5] = program[5], program[4]  # F1.1 and F2.1
    error = refused(with_programs(plan, programs))
    # Stage 2 is rank 0's second chunk; it hears from rank 1 over the link that closes the ring.
    assert headline(error) == (
        "rank 0, place 4: F2.1 takes message 1 from rank 1, which sends the one for F1.1 there"
    )


@given(st.randoms(use_true_random=False), st.integers(2, 4))
@settings(max_examples=200)
def test_swapped_cells_are_refused_or_harmless(rng: random.Random, num_ranks) -> None:
    """Whatever two cells are swapped: the plan is refused, or all of it runs."""
    plan = ruled_plan(random_forest(rng, depth=2), num_ranks)
    programs = cells(plan)
    rank = rng.randrange(num_ranks)
    a, b = (rng.randrange(len(programs[rank])) for _ in range(2))
    programs[rank][a], programs[rank][b] = programs[rank][b], programs[rank][a]
    broken = with_programs(plan, programs)
    orders = {kind: [[c for c in p if c[0] == kind] for p in programs] for kind in "FB"}
    if all(order == orders[kind][0] for kind in "FB" for order in orders[kind]):
        with contextlib.suppress(PlanError):
            assert simulate(broken).num_actions == sum(map(len, programs))
    else:
        refused(broken)


def test_the_grid_marks_cells() -> None:
    programs = with_programs(Plan((), ()), [["F0", "F1", "B1"], ["F0"]]).programs
    assert marked_grid(programs, [(0, 2), (1, 1)]).splitlines() == [
        "    rank 0   rank 1",
        "0   F0       F0",
        "1   F1      >end<     <-- here",
        "2  >B1<               <-- here",
    ]
    assert marked_grid([]) == ""


# The segment table --------------------------------------------------------------------------------


@given(rollout_sets(), tree_options())
@settings(max_examples=100)
def test_forests_have_good_tables(sets, options) -> None:
    check_segments(build(*sets, options).segments)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, {"parent": 0}, "its parent 0 is no inner segment before it"),
        (2, {"parent": 1}, "its parent 1 is no inner segment before it"),
        (1, {"parent": -1}, "a row starts at 4, not at 0"),
        (1, {"rows": (Row(3, 2, 2, (0,)),)}, "a row starts at 3, not at 4"),
        (1, {"rows": ()}, "a row has no positions"),
        (1, {"rows": (Row(4, 0, 0, (0,)),)}, "a row has no positions"),
        (1, {"rows": (Row(4, 3, 2, (0,)),)}, "a row has no positions"),
        (1, {"rows": (Row(4, 2, 2, (0,)), Row(4, 2, 2, (0,)))}, "has a rollout twice"),
        (2, {"rows": (Row(4, 2, 2, (0,)),)}, "rollout 0 comes from segment 1, not from 0"),
        (2, {"rows": (Row(4, 2, 2, (7,)),)}, "rollout 7 comes from segment -1, not from 0"),
        (0, {"rows": (Row(0, 4, 8, (0, 1)),)}, "an inner segment is one row without padding"),
        (1, {"extends": True}, "only an inner segment extends its parent"),
        (0, {"extends": True}, "only an inner segment extends its parent"),
    ],
)
def test_tables_that_are_no_forest_are_refused(index, change, message) -> None:
    segments = list(flat_forest().segments)
    segments[index] = segments[index]._replace(**change)
    with pytest.raises(UserError, match=f"^segment {index}: .*{message}"):
        check_segments(segments)


def test_rollouts_without_a_segment_are_refused() -> None:
    segment = Segment(-1, 0, (Row(0, 2, 2, (1,)),), False, False, True)
    with pytest.raises(UserError, match="rollout 0 is in no segment"):
        check_segments([segment])
