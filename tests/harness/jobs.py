"""Jobs of several data-parallel ranks that share prompts, as the planner makes them."""

from megatron_prefix.lab.plans.job_plan import job_plan
from megatron_prefix.tree import TreeOptions
from tests.harness.joint_jobs import Sizes, dealt
from tests.harness.trees import flat_rollouts


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
