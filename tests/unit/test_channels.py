"""Which ranks may share a process group, and what travels between them."""

from __future__ import annotations

import itertools

import pytest

from megatron_prefix.pipeline.channels import colour
from megatron_prefix.pipeline.p2p import messages
from megatron_prefix.pipeline.planner import make_plan
from megatron_prefix.tree import TreeOptions, build
from tests.harness.trees import flat_rollouts


@pytest.mark.parametrize("size", range(2, 17))
@pytest.mark.parametrize("step", [1, -1])
def test_no_rank_has_two_links_in_one_process_group(size: int, step: int) -> None:
    links = [(sender, (sender + step) % size) for sender in range(size)]
    for one, other in itertools.combinations(links, 2):
        if colour(one[0], size) == colour(other[0], size):
            assert not {*one} & {*other}
    assert {colour(sender, size) for sender in range(size)} == set(range(2 + size % 2))


@pytest.mark.parametrize(("num_ranks", "num_chunks"), [(2, 1), (4, 1), (3, 2), (2, 3)])
def test_what_is_sent_is_what_the_neighbour_runs(num_ranks: int, num_chunks: int) -> None:
    forest = build(*flat_rollouts(64, 16, 4, 2), TreeOptions(wave_tokens=16))
    plan = make_plan(forest, num_ranks, num_chunks=num_chunks)
    for kind, step in (("F", 1), ("B", -1)):
        for sender in range(num_ranks):
            receiver = (sender + step) % num_ranks
            outer = 0 if kind == "F" else plan.num_stages - 1  # receives nothing
            wanted = [
                action
                for action in plan.programs[receiver]
                if action.kind == kind and plan.stage(receiver, action.chunk) != outer
            ]
            assert list(messages(plan, sender, kind)) == wanted
    closing = list(messages(plan, num_ranks - 1, "F"))  # from the last rank to the first
    assert len(closing) == (num_chunks - 1) * len(forest.segments)
    assert all(action.chunk > 0 for action in closing)
