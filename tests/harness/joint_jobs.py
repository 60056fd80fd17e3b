"""Random plans (trees, pipelines, chunks, microbatches and bounds), and random jobs of
data-parallel ranks with pipelines and experts, planned as every rank would (run/planning.py)."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from megatron_prefix.features.across.common import beginnings_of, common_spans
from megatron_prefix.features.across.ranges import told_together
from megatron_prefix.features.across.tries import find_below
from megatron_prefix.lab.plans.job_plan import job_plan
from megatron_prefix.lab.plans.joint_program import Pipeline, Programs, joint_programs
from megatron_prefix.lab.plans.timeline import simulate
from megatron_prefix.plan.joint_forest import joint_forest
from megatron_prefix.plan.planner import best_plan, loss_ready_after, make_plan, with_crossing
from megatron_prefix.tree import Forest, Pairs, TreeOptions, build
from tests.harness.trees import flat_rollouts, random_forest


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


class Case(NamedTuple):
    """The arguments of a random plan; `options` are `make_plan`'s."""

    forest: Forest
    num_ranks: int
    options: dict[str, Any]


def random_case(rng):
    """A random case, of rollouts built into trees or of trees made directly, or a union of some."""
    forest, microbatch_of = _step(rng)
    if rng.random() < 0.1:
        steps = [(forest, microbatch_of), *(_step(rng) for _ in range(rng.randint(1, 2)))]
        union = joint_forest(*(list(parts) for parts in zip(*steps, strict=True)))
        forest, microbatch_of = union.union, [*union.union_microbatch_of]
    num_ranks = rng.randint(1, 8)
    num_chunks = rng.randint(1, 4) if num_ranks > 1 else 1
    return Case(
        forest,
        num_ranks,
        dict(
            num_chunks=num_chunks,
            microbatches=microbatch_of,
            run_ahead=rng.choice((0, 0.5, 1, 2, 3, None)),
            group_size=rng.choice((None, num_ranks, num_ranks + 1, 2 * num_ranks, 1)),
            max_live_positions=rng.choice((0, 0, 1, 50, 200)),
        ),
    )


def run(case, best=False):
    """Plans and simulates; with `best` by `best_plan`."""
    options = case.options
    if best:
        ahead = options["run_ahead"]
        options = {**options, "run_ahead": 2 if ahead is None else ahead}
        del options["max_live_positions"]  # which it sets itself
    plan = (best_plan if best else make_plan)(case.forest, case.num_ranks, **options)
    return simulate(plan, ready_after=loss_ready_after(case.forest, options["microbatches"]))


def _step(rng):
    forest = random_forest(rng) if rng.random() < 0.5 else _built(rng)
    size = rng.randint(1, 4)  # rollouts of a microbatch
    microbatch_of = [rollout // size for rollout in range(len(forest.num_positions))]
    if rng.random() < 0.2:
        rng.shuffle(microbatch_of)
    return forest, microbatch_of


def _built(rng):
    """Groups of rollouts that branch off one text; some are equal."""
    draw = np.random.default_rng(rng.randrange(2**32))
    rollouts, groups = [], []
    for group in range(rng.choice((1, 2, 3, 4, 16))):
        text = draw.integers(0, 5, rng.randint(5, 80))
        for _ in range(rng.randint(1, 6)):
            kept, more = rng.randint(1, len(text)), draw.integers(0, 3, rng.randint(2, 40))
            tokens = np.concatenate([text[:kept], more])
            trained = draw.random(len(tokens) - 1) < rng.choice((0.05, 0.3))
            rollouts.append(Pairs(tokens[:-1], tokens[1:], trained))
            groups.append(group)
    align = rng.choice((1, 1, 2, 4))
    options = TreeOptions(
        multiple=align, chunk_tokens=rng.choice((0, 8, 16, 32)),
        segment_tokens=rng.choice((0, 4, 16, 64, 300)), min_gain=rng.choice((0, 20)),
        loss_in_leaves=rng.random() < 0.2, share=rng.choice(("group", "batch")),
    )  # fmt: skip
    return build(rollouts, groups, options)
