"""The footprint of a rank's model, by its configuration; and where the core measures, in its
place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from megatron_prefix.lab.predict.execution import Execution
from megatron_prefix.lab.predict.footprint import Footprint
from megatron_prefix.lab.predict.model import footprint_of
from megatron_prefix.layers import table
from megatron_prefix.megatron.features import recomputes
from megatron_prefix.moe.versions import is_since
from megatron_prefix.run.execute.byte_meter import ByteMeter
from megatron_prefix.run.rank import Rank


def execution_of(rank: Rank) -> Execution:
    """How a rank's model is computed."""
    form = Execution.of_config(rank.config, recomputes(rank.language_models[0]))
    stages = rank.num_stages * len(rank.models)  # a trainer's config may say another number
    return replace(form, num_stages=stages, holds_projection=is_since("0.18"))


def footprint_of_rank(rank: Rank, *, gathers: bool = False) -> Footprint:
    """Bytes a position of the model on a rank.

    Args:
        gathers: whether it keeps K/V of all context-parallel ranks.
    """
    layers, model = table.with_module_fields(rank.config, rank.language_models), rank.model
    return footprint_of(layers, execution_of(rank), model.vocab_size, model.pattern, gathers)


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
