"""What ranks of a pipeline may share, and what segments are computed from; messages of whole plans
are those of rows of tests/test_cases_on_ranks.py."""

import itertools

import numpy as np
import pytest
import torch

from megatron_prefix.run.execute.inputs import SegmentInputs
from megatron_prefix.run.execute.messages import colour
from megatron_prefix.tree import Pairs, TreeOptions, build

CPU = torch.device("cpu")


# Which ranks may share a process group ------------------------------------------------------------


@pytest.mark.parametrize("size", range(2, 17))
@pytest.mark.parametrize("step", [1, -1])
def test_no_rank_has_two_links_in_one_process_group(size, step):
    links = [(sender, (sender + step) % size) for sender in range(size)]
    for one, other in itertools.combinations(links, 2):
        if colour(one[0], size) == colour(other[0], size):
            assert not {*one} & {*other}
    assert {colour(sender, size) for sender in range(size)} == set(range(2 + size % 2))


def test_padding_has_legal_tokens_and_goes_on_counting():
    rollouts = [Pairs(np.array([5, 6, 7]), np.array([6, 7, 8]), np.ones(3, bool))] * 2
    rollouts[1] = Pairs(np.array([5]), np.array([9]), np.ones(1, bool))
    forest = build(rollouts, None, TreeOptions(multiple=4, min_gain=0))
    inputs = SegmentInputs(forest, rollouts, CPU)
    assert inputs.max_position == 3
    assert inputs[0].tolist() == [
        [5, 6, 7, 0, 5, 0, 0, 0], [6, 7, 8, 0, 9, 0, 0, 0], [0, 1, 2, 3, 0, 1, 2, 3],
    ]  # fmt: skip
