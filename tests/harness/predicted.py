"""What is predicted of a configuration, in the place of what a GPU would measure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from megatron_prefix.lab.predict.of_rank import footprint_of_rank
from megatron_prefix.run.execute.byte_meter import ByteMeter
from megatron_prefix.run.rank import Rank


@contextlib.contextmanager
def predicted_bytes() -> Iterator[None]:
    """Schedules inside take what is predicted as if they had measured it: on a CPU, which counts no
    bytes, policies are chosen as on a GPU."""

    def footprint(meter: ByteMeter, rank: Rank, *, gathers: bool, stock: bool = False) -> Any:
        return footprint_of_rank(rank, gathers=gathers)

    with (
        mock.patch.object(ByteMeter, "footprint", footprint),
        mock.patch.object(ByteMeter, "is_known", True),
    ):
        yield
