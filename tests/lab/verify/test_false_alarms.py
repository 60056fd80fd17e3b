"""A sample of `benchmarks/false_alarms.py`: what is right is aligned, and what is wrong is not."""

import pytest

from tests.harness.one_rank import one_rank
from tests.harness.small_cases import small_case

# Of the first hundred cases, some of the 27 that were called different when the limit followed from
# the tokens alone and each gradient was judged by its own size.  In 28 a gradient vanishes.
SEEDS = (13, 28)


@pytest.fixture(scope="module", autouse=True)
def _rank():
    with one_rank():
        yield


@pytest.mark.parametrize("seed", SEEDS)
def test_right_is_aligned_and_a_millionth_is_noticed(seed):
    compared = small_case(seed).run()
    assert compared.verdict.failures == ()
    assert compared.unnoticed(1 + 1e-6) == []
