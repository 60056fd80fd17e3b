"""Random whole jobs, planned and judged: python -m benchmarks.whole_jobs [--number N] [--seed N].

A job has two to eight data-parallel ranks, one to sixteen pipeline stages, up to two model chunks
each, experts on any divisor of the data-parallel ranks, routers that balance the global batch in a
third of the jobs, and prompts that may cross data-parallel ranks in half of them.  Every rank's
program is played however ranks are held up (lab/plans/joint_judge.py): one message after another,
a batch at a time, and by one hardware queue.  In every tenth job one rank then loses an end of a
message, which must be found.  Exit code 1 when a job does not end, or a loss is not found.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from megatron_prefix.lab.plans.joint_judge import How, judged
from megatron_prefix.lab.plans.joint_program import Batch
from tests.harness.joint_jobs import JointJob, Sizes, random_joint_job


def random_sizes(rng: random.Random) -> Sizes:
    """Of a job of up to 128 ranks."""
    dp, pp = rng.randint(2, 8), rng.choice((1, 2, 3, 4, 6, 8, 12, 16))
    ep = rng.choice([1, *(one for one in range(1, dp + 1) if dp % one == 0)])
    vpp = rng.randint(1, 2) if pp > 1 else 1
    return Sizes(dp, pp, vpp, ep, rng.random() < 0.3, crosses=rng.random() < 0.5)


def verdicts(job: JointJob) -> list[str]:
    """What is wrong with a job however its ranks are held up; nothing: it ends."""
    return [*filter(None, (judged(job.pipelines, job.programs, how=how) for how in How))]


def without_an_end(rng: random.Random, job: JointJob) -> JointJob | None:
    """The job without one batch of messages of one rank; None if it has none."""
    rank = rng.choice([*job.programs])
    program = job.programs[rank]
    places = [place for place, step in enumerate(program) if isinstance(step, Batch)]
    if not places:
        return None
    left_out = rng.choice(places)
    program = [step for place, step in enumerate(program) if place != left_out]
    return JointJob(job.sizes, job.pipelines, {**job.programs, rank: program})


def main() -> int:
    """Judges them and prints the counts; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=2000, help="of jobs (default 2,000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first job")
    what = "leave out all but pipelines that share no plan and sum counts"
    parser.add_argument("--sums", action="store_true", help=what)
    args = parser.parse_args()
    counts, begin = Counter[str](), time.process_time()
    for number in range(args.seed, args.seed + args.number):
        rng = random.Random(number)
        sizes = random_sizes(rng)
        if args.sums and not (sizes.counts and sizes.pp > 1 and sizes.ep < sizes.dp):
            continue
        job = random_joint_job(rng, sizes)
        if wrong := verdicts(job):
            print(f"job {number}, {job.sizes}: {wrong[0]}", flush=True)
        counts["jobs"] += 1
        counts["jobs that do not end"] += bool(wrong)
        counts["jobs with prompts that cross"] += any(p.forest.exchanges for p in job.pipelines)
        counts["jobs with experts"] += job.sizes.ep > 1
        counts["jobs of more than 32 ranks"] += len(job.programs) > 32
        counts["ranks"] += len(job.programs)
        counts["steps of ranks"] += sum(map(len, job.programs.values()))
        if number % 10 == 0 and (broken := without_an_end(rng, job)):
            counts["losses"] += 1
            counts["losses found"] += bool(verdicts(broken))
    for name, count in counts.items():
        print(f"{name}: {count:,}")
    print(f"{time.process_time() - begin:.0f} s on the CPU")
    return int(counts["jobs that do not end"] or counts["losses"] != counts["losses found"])


if __name__ == "__main__":
    sys.exit(main())
