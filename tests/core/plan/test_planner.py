"""Orders and programs of plans; plans that are refused, with the cell to blame."""

import contextlib
import math
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
from megatron_prefix.plan.planner import backward_order, best_plan, loss_ready_after, make_plan
from megatron_prefix.tree import Place, Span, TreeOptions, build
from tests.harness import fuzzing, trees
from tests.harness.fuzzing import rounds
from tests.harness.joint_jobs import crossing_plan, random_case, run
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


@pytest.mark.parametrize(("rank", "edit", "said", "marked"), [
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
])  # fmt: skip
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


@pytest.mark.parametrize(("index", "spans", "message"), [
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
])  # fmt: skip
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
