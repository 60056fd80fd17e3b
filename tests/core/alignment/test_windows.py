"""Layers with a sliding window and attention sinks, in fp64 against plain autograd."""

import functools
import re
from collections import UserList

import pytest
import torch

from megatron_prefix.errors import CannotShare
from megatron_prefix.lab.models.build import unwrap
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
