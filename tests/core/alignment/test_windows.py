"""Layers with a sliding window and attention sinks, in fp64 against plain autograd."""

import dataclasses
import functools
import re
from collections import UserList

import numpy as np
import pytest
import torch

from megatron_prefix.errors import CannotShare
from megatron_prefix.features.windows.windowed import last_positions
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.layers import table
from megatron_prefix.refusals.table import LEARNED_SINKS_CP, SINKS_CP, WINDOW_CP
from megatron_prefix.tree import cp_layout
from megatron_prefix.tree.payload_map import Form
from tests.harness import hybrid, steps
from tests.harness.one_rank import small_model

pytestmark = pytest.mark.usefixtures("on_one_rank")

EXACT = hybrid.limit(128, 3)


def window(left, every=2, **more):
    return {"window_size": (left, 0), "window_attn_skip_freq": every, **more}


CONTRACT, ITEMS = steps.Contract(), hybrid.items()


def model_of(overrides, **options):
    """Equal arguments give equal weights; sinks are not zero."""
    model = small_model(spec={"num_layers": 3}, config_overrides=overrides, **options)
    for number, (name, parameter) in enumerate(unwrap(model).named_parameters()):
        if "softmax_offset" in name:
            draw = torch.Generator().manual_seed(number)
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw))
    return model


@pytest.mark.parametrize("before", [window(6, None), {}], ids=["another window", "none"])
def test_a_window_that_changes_is_seen(before):
    model = model_of(before)
    expected = steps.plain(model_of(before, wrap_ddp=False), CONTRACT, ITEMS)
    assert hybrid.worst(model, expected) <= EXACT
    unwrap(model).config.window_size = 3, 0
    for layer in unwrap(model).decoder.layers:
        layer.self_attention.core_attention.scale_mask_softmax.window_size = 3, 0
    narrow = steps.plain(model_of(window(3, None), wrap_ddp=False), CONTRACT, ITEMS)
    assert hybrid.worst(model, narrow) <= EXACT < hybrid.worst(model, expected)


def test_layers_with_a_window_keep_less():
    held = [hybrid.report_of(model_of(window(left))).cache_bytes for left in (3, 200)]
    assert held[0] < 0.6 * held[1]  # one layer of three is full


@pytest.mark.parametrize("ends", [(4, 2), (0, 0), (5, -1), (-1, 0)])
def test_other_windows_are_refused(ends):
    model = model_of({"window_size": ends})
    with pytest.raises(CannotShare, match=re.escape(f"window_size {ends}: give (positions")):
        hybrid.report_of(model)


class Pair(UserList[int]):
    """A sequence that is no list."""


@pytest.mark.parametrize("given", [[5, 0], Pair([5, 0])])
def test_any_pair_is_a_window(given):
    assert hybrid.worst(model_of(window(0) | {"window_size": given}), five()) <= EXACT


@functools.cache
def five():
    return steps.plain(model_of(window(5), wrap_ddp=False), steps.Contract(), hybrid.items())


def test_the_layer_says_what_its_window_is():
    """Whatever the config says later."""
    model = model_of(window(5))
    for other in ((3, 0), None, 7):
        unwrap(model).config.window_size = other
        assert hybrid.worst(model, five()) <= EXACT


# Context-parallel ranks: which rows they keep, and what is refused --------------------------------


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
    model = unwrap(small_model(config_overrides={"window_size": (4, 0), "softmax_type": softmax}))
    part = table.payload_parts(model)[0]
    config = dataclasses.replace(model.config)
    config.context_parallel_size = 2
    if how is not None:
        part.module.core_attention.cp_comm_type = how
    found = [one.refusal for one in part.kind.option_refusals(part.module, config)]
    assert found == expected
    config.context_parallel_size = 1
    assert not [*part.kind.option_refusals(part.module, config)]
