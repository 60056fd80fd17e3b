"""Whole jobs, data-parallel ranks with pipelines and experts: those that end, and why others do
not."""

import itertools
import random
import re
import sys
from collections import Counter
from dataclasses import replace

import pytest

from megatron_prefix.lab.plans.joint_judge import How, judged, peak_received
from megatron_prefix.lab.plans.joint_program import Batch, Meet, Rank
from megatron_prefix.plan.actions import Action
from tests.harness.fuzzing import rounds
from tests.harness.joint_jobs import Sizes, random_joint_job

SIZES = (
    Sizes(2, 2, 2), Sizes(3, 3), Sizes(4, 2, 2, 2), Sizes(4, 1, 1, 4),
    Sizes(4, 2, 2, 2, counts=True),
)  # fmt: skip
ALONE = (
    Sizes(4, 1, 1, 2, crosses=False), Sizes(4, 2, 2, 2, crosses=False),
    Sizes(2, 3, 2, crosses=False), Sizes(4, 2, 2, 2, counts=True, crosses=False),
)  # fmt: skip
"""Where no prompt crosses data-parallel ranks, so that gradients are reduced during backwards."""


def verdicts(job, programs=None):
    """However ranks are held up; sums of counts only on devices with one queue."""
    hows = [How.ONE_QUEUE] if job.sizes.counts else [*How]
    return [judged(job.pipelines, programs or job.programs, how=how) for how in hows]


def check(seed, sizes=None):
    """A random job that must end."""
    job = random_joint_job(random.Random(seed), sizes)
    assert not any(verdicts(job)), (seed, job.sizes, verdicts(job))
    return job


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_random_jobs_end(sizes):
    crossing = 0
    for seed in range(rounds(5, 100)):
        job = check(seed, sizes)
        crossing += sum(len(one.forest.exchanges) > 0 for one in job.pipelines)
    assert crossing > 5


def reductions(program):
    return places(program, lambda step: isinstance(step, Meet) and step.channel == "gradients")


@pytest.mark.parametrize("sizes", ALONE, ids=str)
def test_jobs_end_whose_gradients_are_reduced_during_backwards(sizes):
    inside = 0
    for seed in range(rounds(8, 200)):
        for program in check(seed, sizes).programs.values():
            first, *_, last = reductions(program)
            assert last == len(program) - 1
            inside += len(program) - first > len(reductions(program))
    assert inside > 10


@pytest.mark.parametrize("sizes", ALONE[:2], ids=str)
def test_reductions_at_places_of_their_own_end_in_a_deadlock(sizes):
    """On one rank as early as its gradients allow, on another at the end: so it was once, where
    backwards of a kind came for the first time on some ranks."""
    found = Counter[str]()
    for seed in range(rounds(8, 100)):
        job = random_joint_job(random.Random(seed), sizes)
        for rank in random.Random(seed).sample([*job.programs], len(job.programs) // 2):
            said, _ = changed(job, rank, postpone)
            found.update(one.partition(":")[0] for one in said)
    assert found["deadlock"] > 5 and {*found} <= {"deadlock", ""}, found


def test_ranks_that_share_only_reductions_may_start_them_later():
    """With virtual stages they may not: another chunk's messages come between."""
    for seed in range(10):
        job = random_joint_job(random.Random(seed), Sizes(3, 2, crosses=False))
        for rank in job.programs:
            assert not any(changed(job, rank, postpone)[0]), (seed, rank)


def postpone(program):
    """All reductions behind all else."""
    wanted = {*reductions(program)}
    late = [step for place, step in enumerate(program) if place in wanted]
    program[:] = [step for place, step in enumerate(program) if place not in wanted] + late


def test_jobs_of_random_sizes_end():
    """2,000 of them: python -m tests.lab.plans.test_joint_judge 2000"""
    for seed in range(1000, 1000 + rounds(20, 2000)):
        check(seed)


# What does not -----------------------------------------------------------------------------------


def jobs(num, sizes):
    """In which prompts cross ranks."""
    made = (random_joint_job(random.Random(seed), sizes) for seed in range(100))
    some = (job for job in made if any(one.forest.received_tokens for one in job.pipelines))
    return [*itertools.islice(some, num)]


def changed(job, rank, change):
    """Verdicts, where one rank's program is another."""
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


@pytest.mark.parametrize("sizes", [Sizes(2, 2, 1, 2)], ids=str)
def test_a_message_that_is_missing(sizes):
    """Between stages and across ranks, whichever end it is."""
    found = Counter[str]()
    for job in jobs(6, sizes):
        for rank, program in job.programs.items():
            for wanted in (between_stages("S"), between_stages("R"), across):
                for place in places(program, wanted)[:3]:
                    said, _ = changed(job, rank, lambda steps, at=place: steps.pop(at))
                    assert all(said), (rank, place)
                    found.update(one.partition(":")[0] for one in said)
    assert found["starvation"] > 20  # ranks wait for it
    assert found["order"] > 20  # or an action is there before what it needs


def swap(steps, one, two):
    steps[one], steps[two] = steps[two], steps[one]


@pytest.mark.parametrize("sizes", [Sizes(3, 3), Sizes(2, 2, 2)], ids=str)
def test_receives_in_another_order(sizes):
    """A stage takes a message as another: two that follow one another on a link."""
    found = Counter[str]()
    for job in jobs(8, sizes):
        for rank, program in job.programs.items():
            here = places(program, between_stages("R"))
            for one, two in itertools.pairwise(here):
                if any(isinstance(step, Action) for step in program[one:two]):
                    continue  # the action may need it
                said, _ = changed(job, rank, lambda s, a=one, b=two: swap(s, a, b))
                link = [program[at].ends[0][1:3] for at in (one, two)]
                if link[0] == link[1]:
                    assert all(text.startswith("order:") for text in said), said
                    found["order"] += 1
    assert found["order"] > 5


def test_payloads_in_another_order():
    """Two of one batch between the same ranks."""
    found = 0
    for job in jobs(30, Sizes(2, 2)):
        for rank, program in job.programs.items():
            for place in places(program, across):
                ends = [*program[place].ends]
                same = [n for n, end in enumerate(ends) if end[:3] == ends[-1][:3]]
                if len(same) > 1:
                    ends[same[0]], ends[same[-1]] = ends[same[-1]], ends[same[0]]
                    step = Batch(tuple(ends))
                    said, _ = changed(job, rank, lambda s, at=place, to=step: s.__setitem__(at, to))
                    assert all(text.startswith("order:") for text in said)
                    found += 1
    assert found > 5


def test_a_window_that_is_too_small():
    for job in jobs(10, Sizes(2, 2, 2)):
        peaks = [
            max(peak_received(one, job.programs[Rank(data, stage)]) for stage in range(2))
            for data, one in enumerate(job.pipelines)
        ]
        assert max(peaks) > 0
        assert judged(job.pipelines, job.programs, peaks) == ""
        for windows in ([0] * 2, [peak - 0.5 for peak in peaks]):
            assert judged(job.pipelines, job.programs, windows).startswith("window: rank")


def test_an_order_that_ranks_do_not_share():
    """What receives need for what follows a level comes before the level crosses: so it was once,
    and pipelines with other segments waited for one another."""
    found = Counter[str]()
    for seed in range(60):
        job = random_joint_job(random.Random(seed), Sizes(3, 2))
        programs = {rank: [*program] for rank, program in job.programs.items()}
        for program in programs.values():
            for place in reversed(places(program, across)):
                behind = place
                while behind + 1 < len(program) and between_stages("R")(program[behind + 1]):
                    swap(program, behind, behind + 1)
                    behind += 1
        said = judged(job.pipelines, programs)
        found[said.partition(":")[0]] += 1
    assert {*found} <= {"", "deadlock"} and found["deadlock"] > 0 and found[""] > 10


def test_experts_that_meet_in_other_actions():
    """A rank leaves a meeting out, or comes to two of them in another order."""
    found = Counter[str]()
    for job in jobs(5, Sizes(2, 2, 1, 2)):
        for rank, program in job.programs.items():
            here = places(program, lambda step: isinstance(step, Meet))
            said, _ = changed(job, rank, lambda s, at=here[0]: s.pop(at))
            found.update(one.partition(":")[0] for one in said)
            assert all(said)
            said, _ = changed(job, rank, lambda s, a=here[0], b=here[1]: swap(s, a, b))
            found.update(one.partition(":")[0] for one in said)
            assert all(said)
    assert found["starvation"] and found["order"]


def test_actions_before_what_they_need():
    [job] = jobs(1, Sizes(2, 1))
    received = next(
        (data, index)
        for data, one in enumerate(job.pipelines)
        for index, segment in enumerate(one.plan.segments)
        if segment.source >= 0
    )
    program = job.programs[Rank(received[0], 0)]
    batch = places(program, across)[0]
    said, _ = changed(job, Rank(received[0], 0), lambda s: s.append(s.pop(batch)))
    assert said[0].startswith("order: rank") and " before R" in said[0]
    first = places(program, lambda step: isinstance(step, Action))[0]
    said, _ = changed(job, Rank(received[0], 0), lambda s: s.insert(first, s[first]))
    assert said[0].endswith("a second time")
    said, _ = changed(job, Rank(received[0], 0), lambda s: s.append(Action("F", 99)))
    assert said[0].endswith("F99 does not exist")


def test_losses_that_are_not_there_yet():
    """Where all need the last forward of their rank."""
    said = []
    for job in jobs(10, Sizes(2, 2)):
        late = [
            replace(one, ready_after=[len(one.plan.segments) - 1] * len(one.plan.segments))
            for one in job.pipelines
        ]
        said.append(judged(late, job.programs))
    assert any(re.match(r"order: rank \d.1: B\d+ before F\d+", text) for text in said)


if __name__ == "__main__":
    for number in range(int(sys.argv[1])):
        check(number)
    print(f"{sys.argv[1]} random jobs end")
