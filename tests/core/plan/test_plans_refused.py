"""Plans that are refused, with the cell to blame, and segment tables that are no forest."""

import contextlib
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prefix.errors import UserError
from megatron_prefix.features.plan_files.rules import check_plan
from megatron_prefix.features.plan_files.segments import check_segments
from megatron_prefix.features.plan_files.table import to_csv
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.actions import Action, Plan, policies
from megatron_prefix.plan.error import PlanError
from megatron_prefix.plan.planner import loss_ready_after, make_plan
from megatron_prefix.tree import Place, Span, TreeOptions, build
from tests.harness import fuzzing, trees
from tests.harness.fuzzing import rounds
from tests.harness.joint_jobs import crossing_plan


def refused(plan, ready_after=None):
    with pytest.raises(PlanError) as caught:
        simulate(plan, ready_after=ready_after)
    error = caught.value
    assert isinstance(error, UserError)
    lines = str(error).splitlines()
    assert lines[1:] == error.grid.splitlines()
    longest = max(map(len, plan.programs))
    assert len(error.grid.splitlines()) in (longest + 1, longest + 2)  # heading, and a missing cell
    return error


def headline(error):
    return str(error).splitlines()[0]


def marked_cells(error):
    """The words that stand between > and < in the grid."""
    return [
        word[1:-1] for line in error.grid.splitlines() for word in line.split() if word[0] == ">"
    ]


def changed(rank, edit, num_ranks=2):
    """A valid plan with one rank's cells edited; rank 1's begin F0 F1 B1 F2 B2 B0."""
    plan = trees.ruled_plan(trees.flat_forest(), num_ranks, run_ahead=1)
    programs = trees.cells(plan)
    edit(programs[rank])
    return trees.with_programs(plan, programs)


EARLY = "B0 runs before the backward of its child 2"


@pytest.mark.parametrize(
    ("rank", "edit", "said", "marked"),
    [
        (1, lambda c: c.remove("B2"), f"rank 1, place 4: {EARLY}", "B0"),
        (0, lambda c: c.remove("B0"), "rank 0 never runs B0", "end"),
        (1, lambda c: [c.remove("F2"), c.remove("B2")], f"rank 1, place 3: {EARLY}", "B0"),
        (1, lambda c: c.insert(5, "F1"), "rank 1, place 5: F1 runs a second time", "F1"),
        (1, lambda c: c.insert(5, "B1"), "rank 1, place 5: B1 runs a second time", "B1"),
        (1, lambda c: c.insert(1, c.pop(2)),
         "rank 1, place 1: B1 runs before its own forward", "B1"),
        (1, lambda c: c.insert(0, c.pop(1)),
         "rank 1, place 0: F1 runs before the forward of its parent 0", "F1"),
        (0, lambda c: c.insert(4, c.pop(5)), f"rank 0, place 4: {EARLY}", "B0"),
        (1, lambda c: c.__setitem__(slice(2, 5), ["F2", "B2", "B1"]),
         "rank 0, place 3: B1 takes message 0 from rank 1, which sends the one for B2 there", "B1"),
    ],
)  # fmt: skip
def test_what_breaks_the_order_is_refused(rank, edit, said, marked):
    error = refused(changed(rank, edit))
    assert headline(error) == said
    assert marked in marked_cells(error) and error.marked[0][0] == int(said.split()[1][0])


def test_what_does_not_exist():
    for cell in ("F9", "F0.1"):
        error = refused(changed(0, lambda cells, cell=cell: cells.insert(2, cell)))
        assert headline(error).startswith(f"rank 0, place 2: {cell} does not exist")
        assert marked_cells(error) == [cell]
    plan = trees.ruled_plan(trees.flat_forest())
    odd = Plan(plan.segments, ((*plan.programs[0], Action("W", 0)),))
    assert "W0 does not exist" in headline(refused(odd))


def test_a_deadlock():
    """Rank 0 wants B0 before it sends F1; rank 1 wants F1 before it runs B0."""
    segments = trees.flat_forest(prefix=4, suffix=2, min_gain=100).segments
    plan = Plan(segments, ((), ()))
    plan = trees.with_programs(plan, [["F0", "B0", "F1", "B1"], ["F0", "F1", "B0", "B1"]])
    error = refused(plan)
    assert headline(error).startswith("deadlock: rank 0 at B0 for rank 1, rank 1 at F1 for rank 0")
    assert error.marked == ((0, 1), (1, 1))
    assert marked_cells(error) == ["B0", "F1"]
    check_plan(plan)  # nothing but the play finds it


def test_a_loss_that_does_not_exist_yet():
    """Both rollouts are one microbatch: no backward of a wave before the forwards of both."""
    forest = trees.flat_forest()
    plan = trees.ruled_plan(forest, 2, run_ahead=1)
    simulate(plan, ready_after=loss_ready_after(forest))
    ready_after = loss_ready_after(forest, [0, 0])
    error = refused(plan, ready_after)
    assert headline(error) == "rank 1, place 2: B1 needs a loss that takes all forwards up to F2"
    simulate(trees.ruled_plan(forest, 2, microbatches=[0, 0]), ready_after=ready_after)


@given(st.randoms(use_true_random=False), st.integers(2, 4))
@settings(max_examples=rounds(50, 500))
def test_swapped_cells_are_refused_or_harmless(rng, num_ranks):
    """Whatever two cells are swapped: the plan is refused, or all of it runs."""
    plan = trees.ruled_plan(trees.random_forest(rng, depth=2), num_ranks)
    programs = trees.cells(plan)
    rank = rng.randrange(num_ranks)
    a, b = (rng.randrange(len(programs[rank])) for _ in range(2))
    programs[rank][a], programs[rank][b] = programs[rank][b], programs[rank][a]
    broken = trees.with_programs(plan, programs)
    orders = {kind: [[c for c in p if c[0] == kind] for p in programs] for kind in "FB"}
    if all(order == orders[kind][0] for kind in "FB" for order in orders[kind]):
        with contextlib.suppress(PlanError):
            assert simulate(broken).num_actions == sum(map(len, programs))
    else:
        refused(broken)


PROMPT = Place(0, 0)


@pytest.mark.parametrize(
    ("index", "spans", "message"),
    [
        (0, [Span(0, 4, 4, (0, 1), PROMPT)], "its parent span 0.0 is not a span of an inner"),
        (2, [Span(6, 2, 2, (1,), Place(1, 0))], "its parent span 1.0 is not a span of an inner"),
        (2, [Span(4, 2, 2, (1,), Place(0, 1))], "its parent span 0.1 is not a span of an inner"),
        (2, [Span(4, 2, 2, (1,), Place(3, 0))], "its parent span 3.0 is not a span of an inner"),
        (1, [Span(4, 2, 2, (0,))], "a root starts at 4, not at 0"),
        (1, [Span(0, 2, 2, (0,))], "rollout 0 comes from span 0.0, not from no span"),
        (1, [Span(3, 2, 2, (0,), PROMPT)], "a span starts at 3, not at 4, where its parent ends"),
        (1, [], "has no span"),
        (1, [Span(4, 0, 0, (0,), PROMPT)], "a span has no positions"),
        (1, [Span(4, 3, 2, (0,), PROMPT)], "a span has no positions"),
        (1, [Span(4, 2, 2, (0,), PROMPT)] * 2, "has a rollout twice"),
        (1, [Span(4, 2, 2, (0,), PROMPT), Span(3, 2, 2, (1,), PROMPT)], "a span starts at 3"),
        (2, [Span(4, 2, 2, (0,), PROMPT)], "rollout 0 comes from span 1.0, not from span 0.0"),
        (2, [Span(4, 2, 2, (7,), PROMPT)], "rollout 7 comes from no span, not from span 0.0"),
        (0, [Span(0, 4, 8, (0, 1))], "a span of an inner segment has padding"),
    ],
)
def test_tables_that_are_no_forest_are_refused(index, spans, message):
    segments = list(trees.flat_forest().segments)
    segments[index] = segments[index]._replace(spans=tuple(spans))
    with pytest.raises(UserError, match=f"^segment {index}: .*{message}"):
        check_segments(segments)


# Plan files with something changed: run, or refused in one line -----------------------------------

NUM_CASES = 40


def texts():
    rollouts, groups = trees.flat_rollouts(9, 4, 3, 2)
    forest = build(rollouts, groups, TreeOptions(min_gain=0, segment_tokens=8, chunk_tokens=4))
    plain = make_plan(forest, 2)
    mixed = replace(plain, policies=policies(plain.segments, "recompute"))
    plans = (plain, mixed, make_plan(forest, 2, num_chunks=2), crossing_plan())
    return [to_csv(plan) for plan in plans]


@pytest.mark.parametrize("number", range(4))
def test_a_changed_plan_is_shown_or_refused_in_one_line(tmp_path, number):
    path, text, bad = tmp_path / "plan.csv", texts()[number], {}
    picture = str(tmp_path / "plan.svg")
    for seed in range(NUM_CASES):
        rng = random.Random(1000 * number + seed)
        path.write_bytes(fuzzing.changed_cells(rng, text))
        bad[seed] = fuzzing.fault("show", str(path), "--svg", picture)
    assert not {seed: fault for seed, fault in bad.items() if fault}
