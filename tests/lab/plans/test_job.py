"""Plans of several data-parallel ranks, what of them is refused by name, and the catalogue."""

import itertools
import random
import shutil
from collections import Counter

import pytest

from megatron_prefix.features.plan_files.table import parse_action, to_csv
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import read_groups
from megatron_prefix.lab.plans import catalogue
from megatron_prefix.lab.plans.job import simulate_job
from megatron_prefix.lab.plans.joint_judge import How, judged, peak_received
from megatron_prefix.lab.plans.joint_program import Batch, Meet, Rank
from megatron_prefix.plan.actions import Plan, Transfer
from megatron_prefix.plan.error import PlanError
from megatron_prefix.plan.planner import best_plan
from megatron_prefix.tree import Place, Segment, Span, build
from tests.harness.data import REPOSITORY
from tests.harness.fuzzing import rounds
from tests.harness.joint_jobs import Sizes, random_job, random_joint_job


def inner(start, length, parent=None, source=-1):
    return Segment((Span(start, length, length, (0,), parent),), True, False, source=source)


def wave(start, length, parent):
    return Segment((Span(start, length, length, (0,), parent),), False, True)


def plan(segments, text, *transfers):
    return Plan(tuple(segments), (tuple(map(parse_action, text.split())),), transfers=transfers)


def two(sender="F0 S0>1 F1 B1 R0<1 B0", receiver="R0<0 F1 B1 S0>0"):
    """Rank 0 computes a prompt of 4 positions, and both have a wave of 2 below it."""
    return [
        plan([inner(0, 4), wave(4, 2, Place(0, 0))], sender, Transfer(0, 1, (0,))),
        plan([inner(0, 4, source=0), wave(4, 2, Place(0, 0))], receiver),
    ]


def chain(last="R0<0 R1<1 F2 B2 S1>1 S0>0", owner="F0 S0>1 S0>2 R0<1 R0<2 B0"):
    """Rank 0 computes a prompt, rank 1 what continues it; rank 2 has a wave below both."""
    top, below = Place(0, 0), Place(1, 0)
    return [
        plan([inner(0, 4)], owner, Transfer(0, 1, (0,)), Transfer(0, 2, (0,))),
        plan(
            [inner(0, 4, source=0), inner(4, 3, top), wave(7, 2, below)],
            "R0<0 F1 S1>2 F2 B2 R1<2 B1 S0>0",
            Transfer(1, 2, (0,)),
        ),
        plan([inner(0, 4, source=0), inner(4, 3, top, 1), wave(7, 2, below)], last),
    ]


def crossed(first="F0 S0>1 R1<1 F2 B2 S1>1 R0<1 B0", second="F1 R0<0 S1>0 F2 B2 R1<0 S0>0 B1"):
    """Each of two ranks computes a prompt for both; rank 1 has its own second."""
    waves = Segment(
        (Span(4, 2, 2, (0,), Place(0, 0)), Span(5, 2, 2, (1,), Place(1, 0))), False, True
    )
    return [
        plan([inner(0, 4), inner(0, 5, source=1), waves], first, Transfer(0, 1, (0,))),
        plan([inner(0, 4, source=0), inner(0, 5), waves], second, Transfer(1, 0, (0,))),
    ]


def refused(plans, ready_after=None):
    """The first line; a grid of all ranks follows."""
    with pytest.raises(PlanError) as caught:
        simulate_job(plans, ready_after)
    first, _, grid = str(caught.value).partition("\n")
    assert all(f"rank {rank}" in grid.splitlines()[0] for rank in range(len(plans)))
    for rank, place in caught.value.marked:
        program = plans[rank].programs[0]
        assert f">{program[place] if place < len(program) else 'end'}<" in grid
    return first


def test_times_of_two_ranks():
    found = simulate_job(two(), [[0, 1], [0, 1]], seconds_per_position_sent=0.5)
    # The payload crosses from 4 to 6, the gradients from 12 to 14.
    assert [(event.start, event.end) for event in found.events] == [
        *[(0, 4), (4, 6), (4, 6), (6, 10), (12, 14), (14, 22)],
        *[(4, 6), (6, 8), (8, 12), (12, 14)],
    ]
    assert (found.makespan, found.busy, found.waiting) == (22, (18, 6), (4, 8))
    assert (found.received_positions, found.peak_received) == ((0, 4), (0, 4))


@pytest.mark.parametrize(("plans", "message"), [
    (two("F0 S0>1 F1 B1 R0<1"), "rank 0 never runs B0"),
    (two("F0 F1 B1 R0<1 B0"), "rank 0, place 3: R0<1 runs before S0>1"),
    (two("F0 S0>1 S0>1 F1 B1 R0<1 B0"), "rank 0, place 2: S0>1 runs a second time"),
    (two("F0 S0>1 F7 F1 B1 R0<1 B0"), "rank 0, place 2: F7 does not exist"),
    (two("F0 S0>0 F1 B1 R0<1 B0"), "rank 0, place 1: S0>0 does not exist"),
    (two(receiver="F0 F1 B1 S0>0"), "rank 1, place 0: F0 does not exist"),
    (two("F1 F0 S0>1 B1 R0<1 B0"), "rank 0, place 0: F1 runs before F0"),
    (two(receiver="F1 R0<0 B1 S0>0"), "rank 1, place 0: F1 runs before R0<0"),
    (two("S0>1 F0 F1 B1 R0<1 B0"), "rank 0, place 0: S0>1 runs before F0"),
    (two("F0 S0>1 F1 R0<1 B0 B1"), "rank 0, place 4: B0 runs before B1"),
    (two(receiver="R0<0 F1 S0>0 B1"), "rank 1, place 2: S0>0 runs before B1"),
    (two("F0 S0>1 B1 F1 R0<1 B0"), "rank 0, place 2: B1 runs before F1"),
    (chain("R1<1 F2 R0<0 B2 S1>1 S0>0"), "rank 2, place 1: F2 runs before R0<0"),
    (chain("R0<0 R1<1 F2 B2 S0>0 S1>1"), "rank 2, place 4: S0>0 runs before S1>1"),
])  # fmt: skip
def test_a_program_that_breaks_a_rule(plans, message):
    assert refused(plans).startswith(message)


def test_deadlocks():
    """Both send first, which only messages that do not block would survive."""
    first = "F1 S1>0 R0<0 F2 B2 R1<0 S0>0 B1"
    assert refused(crossed(second=first)) == (
        "deadlock: rank 0, place 1: S0>1 for rank 1, rank 1, place 1: S1>0 for rank 0"
        " wait in a circle"
    )
    late = chain("R1<1 R0<0 F2 B2 S1>1 S0>0", "F0 S0>2 S0>1 R0<1 R0<2 B0")
    message = refused(late)
    assert message.startswith("deadlock: ") and message.count("place") == 3


def test_random_jobs_of_the_planner_run():
    sent = 0
    for seed in range(100):
        job = random_job(random.Random(seed))
        found = simulate_job(job.plans, job.ready_after, seconds_per_position_sent=0.1)
        assert len(found.events) == sum(len(plan.programs[0]) for plan in job.plans)
        for rank, one in enumerate(job.plans):
            assert found.busy[rank] + found.waiting[rank] <= found.makespan + 1e-6
            assert found.peak_received[rank] <= found.received_positions[rank]
            assert sum(segment.source >= 0 for segment in one.segments) == sum(
                transfer.peer == rank for plan in job.plans for transfer in plan.transfers
            )
        sent += sum(len(plan.transfers) for plan in job.plans)
    assert sent > 300


# Whole jobs, with pipelines and experts -----------------------------------------------------------


SIZES = (
    Sizes(2, 2, 2), Sizes(3, 3), Sizes(4, 2, 2, 2), Sizes(4, 1, 1, 4),
    Sizes(4, 3, 2, 2, counts=True), Sizes(4, 2, 2, 2, crosses=False),
    Sizes(4, 4, 1, counts=True, crosses=False), Sizes(8, 16, 1, 4),
)  # fmt: skip
"""Where no prompt crosses data-parallel ranks, gradients are reduced during backwards."""


def verdicts(job, programs=None):
    """However ranks are held up."""
    return [judged(job.pipelines, programs or job.programs, how=how) for how in How]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_random_jobs_end(sizes):
    crossing = 0
    for seed in range(rounds(5, 100)):
        job = random_joint_job(random.Random(seed), sizes)
        assert not any(found := verdicts(job)), (seed, found)
        crossing += sum(len(one.forest.exchanges) > 0 for one in job.pipelines)
    assert crossing > 5 or not sizes.crosses


def common(job, rank, neighbour):
    """Messages with a neighbour, and sums, in the order in which a rank begins them; it reduces no
    gradients."""
    return [
        step.what if isinstance(step, Meet) else step.ends[0].what
        for step in job.programs[rank]
        if isinstance(step, Meet) or (isinstance(step, Batch) and step.ends[0].peer == neighbour)
    ]


def test_stages_begin_messages_and_sums_in_one_order():
    for seed in range(10):
        job = random_joint_job(random.Random(seed), Sizes(2, 4, 2, counts=True, overlaps=False))
        for rank in job.programs:
            neighbour = rank._replace(stage=(rank.stage + 1) % 4)
            assert common(job, rank, neighbour) == common(job, neighbour, rank)


def jobs(num, sizes):
    """In which prompts cross ranks."""
    made = (random_joint_job(random.Random(seed), sizes) for seed in range(100))
    some = (job for job in made if any(one.forest.received_tokens for one in job.pipelines))
    return [*itertools.islice(some, num)]


def changed(job, rank, change):
    program = [*job.programs[rank]]
    change(program)
    programs = {**job.programs, rank: program}
    return verdicts(job, programs), programs


def places(program, wanted):
    return [place for place, step in enumerate(program) if wanted(step)]


def between_stages(kind):
    return lambda step: (
        isinstance(step, Batch) and step.ends[0].kind == kind and step.ends[0].channel != "across"
    )


def across(step):
    return isinstance(step, Batch) and step.ends[0].channel == "across"


def test_a_message_that_is_missing():
    """Between stages and across ranks, whichever end it is."""
    found = Counter[str]()
    for job in jobs(3, Sizes(2, 2, 1, 2)):
        for rank, program in job.programs.items():
            for wanted in (between_stages("S"), between_stages("R"), across):
                for place in places(program, wanted)[:3]:
                    said, _ = changed(job, rank, lambda steps, at=place: steps.pop(at))
                    assert all(said), (rank, place)
                    found.update(one.partition(":")[0] for one in said)
    assert found["starvation"] > 10  # ranks wait for it
    assert found["order"] > 10  # or an action is there before what it needs


def test_a_window_that_is_too_small():
    for job in jobs(4, Sizes(2, 2, 2)):
        peaks = [
            max(peak_received(one, job.programs[Rank(data, stage)]) for stage in range(2))
            for data, one in enumerate(job.pipelines)
        ]
        assert max(peaks) > 0
        assert judged(job.pipelines, job.programs, peaks) == ""
        for windows in ([0] * 2, [peak - 0.5 for peak in peaks]):
            assert judged(job.pipelines, job.programs, windows).startswith("window: rank")


FOLDER = REPOSITORY / "schedules"
WANTED = dict(catalogue.plans(FOLDER))
SHAPES = {shape.name: shape for shape in catalogue.read_catalogue(FOLDER)[0]}


@pytest.mark.parametrize("name", SHAPES)
def test_rollouts_of_a_shape_give_its_plans(tmp_path, name):
    path = tmp_path / "rollouts.jsonl"
    assert catalogue.main([str(FOLDER), "--rollouts", name, str(path)]) is None
    forest = build(*pairs_of_groups(list(read_groups(path))), SHAPES[name].options)
    assert to_csv(best_plan(forest, 2)) == WANTED[f"{name}-pp2.csv"]


def test_files_are_what_the_command_writes(tmp_path):
    assert catalogue.main([str(FOLDER), "--check"]) is None
    shutil.copy(FOLDER / "catalogue.toml", tmp_path)
    wrong = catalogue.main([str(tmp_path), "--check"])
    assert wrong is not None and "flat-group-pp1.csv" in wrong
    assert catalogue.main([str(tmp_path)]) is None
    found = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.csv")}
    assert found == WANTED
    assert catalogue.main([str(tmp_path), "--check"]) is None
    (tmp_path / "more.csv").write_text("", encoding="utf-8")
    file = tmp_path / "uneven-groups-pp8.csv"
    file.write_text(WANTED[file.name].replace("rank 0,F0", "rank 0,F1"), encoding="utf-8")
    assert catalogue.main([str(tmp_path), "--check"]) == (
        "not what the catalogue makes: more.csv, uneven-groups-pp8.csv"
    )
    assert catalogue.main([str(FOLDER), "--rollouts", "no", "x"]).startswith("no: no such shape")
