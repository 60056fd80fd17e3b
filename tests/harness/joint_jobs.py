"""Random jobs of data-parallel ranks with pipelines, experts and counts, planned as every rank
would (run/planning.py)."""

from dataclasses import dataclass, replace

import numpy as np

from megatron_prefix.features.across.common import beginnings_of, common_spans
from megatron_prefix.features.across.ranges import told_together
from megatron_prefix.features.across.tries import find_below
from megatron_prefix.lab.plans.job_plan import job_plan
from megatron_prefix.lab.plans.joint_program import Pipeline, Programs, joint_programs
from megatron_prefix.plan.joint_forest import joint_forest
from megatron_prefix.plan.planner import best_plan, loss_ready_after, make_plan, with_crossing
from megatron_prefix.tree import Pairs, TreeOptions
from tests.harness.trees import flat_rollouts


@dataclass(frozen=True)
class Sizes:
    """Of a job.

    Attributes:
        dp, pp, vpp, ep: ranks of each kind; those that share experts are neighbours.
        counts: routers balance the global batch.
        crosses: whether prompts may cross data-parallel ranks.
        overlaps: whether gradients are reduced during backwards.
    """

    dp: int
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    counts: bool = False
    crosses: bool = True
    overlaps: bool = True


@dataclass(frozen=True)
class JointJob:
    """A job, and its programs."""

    sizes: Sizes
    pipelines: list[Pipeline]
    programs: Programs


def random_sizes(rng):
    """Two to four data-parallel ranks of up to three stages, each with up to two model chunks."""
    dp, pp = rng.choice((2, 2, 3, 4)), rng.randint(1, 3)
    ep = rng.choice([one for one in (1, 1, 2, 3, 4) if dp % one == 0])
    vpp = rng.randint(1, 2) if pp > 1 else 1
    return Sizes(dp, pp, vpp, ep, rng.random() < 0.3, crosses=rng.random() < 0.5)


def random_joint_job(rng, sizes=None):
    """A random step of a job of some sizes, or of random ones."""
    sizes = sizes or random_sizes(rng)
    ranks = [*dealt(rng, sizes)]
    options = TreeOptions(
        min_gain=0, share="batch", segment_tokens=rng.choice((0, 40, 100, 200)),
        chunk_tokens=rng.choice((0, 0, 12, 30)),
    )  # fmt: skip
    size = rng.randint(1, 3)
    owners = [[number // size for number in range(len(rank))] for rank in ranks]
    together = [(ranks, owners)]
    if not sizes.crosses:
        together = [([rank], [mine]) for rank, mine in zip(ranks, owners, strict=True)]
    forests = [
        forest for some in together for forest in forests_of(*some, options, ordered=sizes.counts)
    ]
    pipelines = [*_pipelines(rng, sizes, forests, owners, ranks)]
    programs = joint_programs(pipelines, counts=sizes.counts, overlaps=sizes.overlaps)
    return JointJob(sizes, pipelines, programs)


def forests_of(ranks, owners, options, *, ordered):
    told = [beginnings_of(rank, options, block=1) for rank in ranks]
    heard = told_together([beginnings for beginnings, _ in told])
    found = []
    for place, rank in enumerate(ranks):
        common = common_spans(heard, place, options)
        forest = find_below(rank, options, told[place][1], common).forest(
            microbatch_of=owners[place]
        )
        found.append(replace(forest, ordered=ordered))
    return found


def _pipelines(rng, sizes, forests, owners, ranks):
    make = rng.choice((make_plan, best_plan))
    options = dict(
        num_chunks=sizes.vpp, run_ahead=rng.choice((0, 1, 2, 3)),
        group_size=rng.choice((None, sizes.pp, sizes.pp + 1)),
    )  # fmt: skip
    live = rng.choice((0, 0, 1, 50))
    if make is make_plan:
        options["max_live_positions"] = live
    for first in range(0, sizes.dp, sizes.ep):
        group = range(first, first + sizes.ep)
        together = [forests[one] for one in group], [owners[one] for one in group]
        for place, data in enumerate(group):
            joint = joint_forest(*together, place)
            union = with_crossing(
                make(joint.union, sizes.pp, microbatches=joint.union_microbatch_of, **options),
                joint.union,
            )
            plan = replace(union, segments=joint.forest.segments)
            yield Pipeline(
                plan, joint.forest, union, tuple(group) if sizes.ep > 1 else (),
                [*_names(joint.forest, ranks[data])], joint.microbatch_of,
                joint.union_microbatch_of,
                loss_ready_after(joint.forest, joint.microbatch_of),
            )  # fmt: skip


def _names(forest, rollouts):
    """What spans are: all tokens up to their ends, and where they begin."""
    for segment in forest.segments:
        yield [
            (span.start, rollouts[span.rollouts[0]].codes(0, span.end).tobytes())
            if span.rollouts
            else ()
            for span in segment.spans
        ]


def dealt(rng, sizes):
    """Rollouts of some prompts on random ranks, as many on each where they count together."""
    prompts = [
        [rng.randrange(50) for _ in range(rng.randint(5, 60))] for _ in range(rng.randint(1, 6))
    ]
    num = rng.randint(1, 8)
    for _ in range(sizes.dp):
        few = 0 if rng.random() < 0.1 else rng.randint(1, 8)
        yield [_rollout(rng, rng.choice(prompts)) for _ in range(num if sizes.counts else few)]


def _rollout(rng, prompt):
    """Some continue a prompt, some leave it half way down."""
    cut = rng.choice([len(prompt), rng.randint(1, len(prompt))])
    tokens = np.array(prompt[:cut] + [rng.randrange(3) for _ in range(rng.randint(2, 20))])
    begin = rng.choice((cut, cut, rng.randint(1, cut)))
    return Pairs(tokens[:-1], tokens[1:], np.arange(len(tokens) - 1) >= begin - 1)


def random_job(rng):
    """Random rollouts on two to four ranks, some of which have none."""
    ranks = [*dealt(rng, Sizes(rng.randint(2, 4)))]
    options = TreeOptions(
        min_gain=0, share="batch", segment_tokens=rng.choice((0, 40, 100)),
        chunk_tokens=rng.choice((0, 0, 12)),
    )  # fmt: skip
    return job_plan(ranks, [[*range(len(one))] for one in ranks], options)


def crossing_plan():
    """The first one of two ranks, each of which sends to the other."""
    return crossing_job().plans[0]


def crossing_job():
    """Six groups of four rollouts, of which each of two ranks has two."""
    rollouts, _ = flat_rollouts(64, 16, 4, 6)
    options = TreeOptions(min_gain=0, segment_tokens=64, share="batch")
    ranks = [[*rollouts[start::2]] for start in range(2)]
    return job_plan(ranks, [[*range(12)]] * 2, options)
