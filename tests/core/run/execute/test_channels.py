"""Which ranks may share a process group."""

from __future__ import annotations

import itertools

import pytest

from megatron_prefix.run.execute.messages import colour


@pytest.mark.parametrize("size", range(2, 17))
@pytest.mark.parametrize("step", [1, -1])
def test_no_rank_has_two_links_in_one_process_group(size: int, step: int) -> None:
    links = [(sender, (sender + step) % size) for sender in range(size)]
    for one, other in itertools.combinations(links, 2):
        if colour(one[0], size) == colour(other[0], size):
            assert not {*one} & {*other}
    assert {colour(sender, size) for sender in range(size)} == set(range(2 + size % 2))
