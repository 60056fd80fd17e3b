"""What the first stage tells the others travels in one message, however long it is."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime.layout import Layout
from megatron_prefix.run.read import step
from tests.harness.ranks import run_ranks

CPU = torch.device("cpu")


def told(count: int) -> tuple[bool, int]:
    """Whether this rank knows the first one's numbers, and by how many messages."""
    runtime.initialize(Layout(pp=2))
    try:
        numbers = list(range(5, 5 + count))
        with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
            mine = np.array(numbers if dist.get_rank() == 0 else [], np.int64)
            found = step._broadcast(mine, dist.group.WORLD, 0, CPU)
        return found.tolist() == numbers, broadcast.call_count
    finally:
        runtime.shutdown()


@pytest.mark.parametrize(
    ("count", "messages"),
    [(0, 1), (3, 1), (step.MESSAGE_NUMBERS - 1, 1), (step.MESSAGE_NUMBERS, 2), (20_000, 2)],
)
def test_numbers_of_any_length_arrive(count: int, messages: int) -> None:
    assert run_ranks(2, told, count) == [(True, messages)] * 2
