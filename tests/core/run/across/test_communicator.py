"""What data-parallel ranks know of one another's payloads."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_prefix.features.across.communicator import Communicator
from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout
from tests.harness.ranks import run_ranks


def told() -> list[object]:
    """A rank's part: the first says what its rows are, three times; the other hears the first."""
    runtime.initialize(Layout(dp=2))
    made, model = Communicator(dist.group.WORLD, torch.device("cpu")), torch.nn.Linear(1, 1)
    known, found = made.known(model, False, False), list[object]()
    sent: list[object] = []  # a message that nobody keeps is lost
    if made.rank == 1:
        found.append(made.rows(0, known, 1))
    for width in (3, 3, 4) if made.rank == 0 else ():
        try:
            sent.append(made.tell_rows(1, known, [(torch.zeros(2, width),)]))
            found.append(sent[-1] is not None)
        except RuntimeError as error:
            found.append(str(error))
    dist.barrier()
    # Another model, pass or mode is another payload.
    others = [made.known(torch.nn.Linear(1, 1), False, False), made.known(model, True, False)]
    others.append(made.known(model, False, True))
    others.append(made.known(model.eval(), False, False))
    found.append(all(one is not known and not one.told for one in others))
    runtime.shutdown()
    return found


def test_rows_are_said_once_and_may_not_change() -> None:
    first, second = run_ranks(2, told)
    assert first[:2] == [True, False] and "other shapes or dtypes" in str(first[2])
    assert second[0] == [[((3,), torch.float32)]]
    assert first[-1] and second[-1]
