"""Whole jobs, data-parallel ranks with pipelines and experts: those that end, and why others do
not."""

import itertools
import random
from collections import Counter

import pytest

from megatron_prefix.lab.plans.joint_judge import How, judged, peak_received
from megatron_prefix.lab.plans.joint_program import Batch, Rank
from tests.harness.fuzzing import rounds
from tests.harness.joint_jobs import Sizes, random_joint_job

SIZES = (
    Sizes(2, 2, 2), Sizes(3, 3), Sizes(4, 2, 2, 2), Sizes(4, 1, 1, 4),
    Sizes(4, 2, 2, 2, counts=True), Sizes(4, 2, 2, 2, crosses=False),
    Sizes(4, 2, 2, 2, counts=True, crosses=False),
)  # fmt: skip
"""Where no prompt crosses data-parallel ranks, gradients are reduced during backwards."""


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
    assert crossing > 5 or not sizes.crosses


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
