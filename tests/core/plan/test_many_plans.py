"""Plans of every kind run: no deadlock, no dependency violated, no bound that stops a rank.

`python -m benchmarks.random_plans` runs ten thousand of them.
"""

from __future__ import annotations

import random

import pytest

from tests.harness.plans import random_case, run


@pytest.mark.parametrize("seed", range(2))
def test_random_plans_run(seed: int) -> None:
    rng = random.Random(seed)
    for number in range(100):
        case = random_case(rng)
        timeline = run(case, best=number % 10 == 0)
        chunks = case.options["num_chunks"]
        assert timeline.num_actions == 2 * len(case.forest.segments) * case.num_ranks * chunks
        work = 3 * sum(segment.padded_length for segment in case.forest.segments)
        assert timeline.busy == pytest.approx([work] * case.num_ranks)
