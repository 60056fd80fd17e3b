"""Sliding windows and sinks on context-parallel ranks: which rows they keep, and what is refused.

Steps are rows of tests/test_cases_on_ranks.py, as are mistakes that they notice.
"""

import dataclasses

import numpy as np
import pytest

from megatron_prefix.features.windows.windowed import last_positions
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.layers import table
from megatron_prefix.refusals.table import LEARNED_SINKS_CP, SINKS_CP, WINDOW_CP
from megatron_prefix.tree import cp_layout
from megatron_prefix.tree.payload_map import Form
from tests.harness.one_rank import one_rank, small_model


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("last", [1, 3, 8, 100])
def test_last_rows_are_dealt_once(size, last):
    """Of all last positions each is some rank's, at its place."""
    lengths = [8 * size, 2 * size, 12 * size]
    left = [Form("positions", last).rows(length) for length in lengths]
    whole = np.full(sum(left), -1)
    for rank in range(size):
        held = cp_layout.held_positions(lengths, rank, size)
        mine, places = last_positions(lengths, left, rank, size)
        assert (whole[places] == -1).all()
        whole[places] = held[mine]
    ends = np.cumsum(lengths)
    wanted = [np.arange(end - num, end) for end, num in zip(ends, left, strict=True)]
    assert (whole == np.concatenate(wanted)).all()


@pytest.mark.parametrize(
    ("softmax", "how", "expected"),
    [("vanilla", None, []), ("learnable", None, []), ("vanilla", "a2a", []),
     ("vanilla", "all_gather", []), ("vanilla", "p2p", [WINDOW_CP]),
     ("vanilla", "a2a+p2p", [WINDOW_CP]), ("off-by-one", "a2a", []),
     ("off-by-one", "all_gather", [SINKS_CP]), ("learnable", "p2p", [SINKS_CP, WINDOW_CP]),
     ("learnable", "a2a", [LEARNED_SINKS_CP])],
)  # fmt: skip
def test_what_the_stock_module_cannot_do_is_refused(softmax, how, expected):
    """The module says how it exchanges keys; Megatron's own one has no context parallelism."""
    with one_rank():
        window = {"window_size": (4, 0), "softmax_type": softmax}
        model = unwrap(small_model(config_overrides=window))
        part = table.payload_parts(model)[0]
        config = dataclasses.replace(model.config)
    config.context_parallel_size = 2
    if how is not None:
        part.module.core_attention.cp_comm_type = how
    found = [one.refusal for one in part.kind.option_refusals(part.module, config)]
    assert found == expected
    config.context_parallel_size = 1
    assert not [*part.kind.option_refusals(part.module, config)]
