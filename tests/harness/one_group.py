"""Steps of one group on one rank: by our schedule, by Megatron's, and what must agree."""

import numpy as np

from megatron_prefix.config import PrefixConfig
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import steps
from tests.harness.one_rank import small_model
from tests.harness.steps import Contract


def items(num=5, prompt=14):
    """One group of rollouts with a common prompt."""
    draw = np.random.default_rng(1)
    return steps.answers(draw, [draw.integers(0, 60, prompt)] * num, 4, prompt - 1)


def schedule_with(*, looks_first=False, **fields):
    config = PrefixConfig(**{"min_gain": 0, "kernel": "math", **fields})
    return PrefixSchedule(config, looks_first=looks_first)


def run(schedule, model, contract=None, data=None, **options):
    return steps.run(schedule, (contract or Contract()).step, model, data or items(), **options)


def assert_aligned(found, model, contract=None):
    """Against plain autograd on a twin of `model`, as random trees are."""
    wanted = steps.plain(small_model(wrap_ddp=False), contract or Contract(), items())
    steps.assert_gradients(found[1], wanted, sum(item["tokens"].numel() for item in items()))
