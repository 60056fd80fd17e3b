"""Hooks on a model while a segment runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.layers.blocks.interface import Runs
from megatron_prefix.layers.segment import SegmentContext
from megatron_prefix.megatron.install import install
from megatron_prefix.sidecar.cache import SidecarCache
from megatron_prefix.tree import Segment, Span
from megatron_prefix.tree.payload_map import Form, payload_map
from tests.harness.one_rank import one_rank, small_model


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def context(positions: list[int]) -> SegmentContext:
    """A wave of one rollout without ancestors, at any positions."""
    num = len(positions)
    segment = Segment((Span(0, num, num, (0,)),), inner=False, scored=True)
    cache = SidecarCache(payload_map([segment]), [Form.POSITIONS] * 2)
    return SegmentContext(0, False, Runs.own((num,)), torch.tensor(positions), cache)


def test_what_runs_is_taken_back_after_an_exception() -> None:
    model = small_model()
    hooks = install(model)
    with contextlib.suppress(KeyboardInterrupt), hooks.running(context([0]), scored=False):
        assert hooks.current is not None and unwrap(model).post_process is False
        raise KeyboardInterrupt
    assert hooks.current is None and unwrap(model).post_process is True
    assert model(*[torch.arange(4)[None]] * 2, None).shape == (1, 4, 128)


def test_a_segment_without_loss_stops_before_the_output_layer() -> None:
    model = small_model()
    hooks = install(model, "math")
    hooks.prepare(3)
    tokens = torch.arange(4)[None]
    with hooks.running(context([0, 1, 2, 3]), scored=False):
        assert model(tokens, tokens, None, labels=tokens).shape == (4, 1, 64)
    with hooks.running(context([0, 1, 2, 3]), scored=True):
        assert model(tokens, tokens, None, labels=tokens).shape == (1, 4)


@pytest.mark.parametrize("positions", [[5, 6, 7, 8], [0, 1, 5, 6], [100, 3, 3, 64]])
def test_every_row_gets_the_rotary_embedding_of_its_position(positions: list[int]) -> None:
    model = small_model()
    hooks = install(model, "math")
    hooks.prepare(max(positions))
    seen: dict[str, Tensor] = {}
    gpt = unwrap(model)
    gpt.decoder.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    tokens = torch.arange(4)[None]
    with hooks.running(context(positions)):
        model(tokens, torch.tensor([positions]), None, labels=tokens)
    whole = gpt.rotary_pos_emb.get_emb(101)
    assert torch.equal(seen["rotary_pos_emb"], whole[positions])
    model(tokens, torch.arange(4)[None], None, labels=tokens)
    assert torch.equal(seen["rotary_pos_emb"], whole[:4])


def test_packed_sequences_of_a_trainer_do_not_reach_a_segment() -> None:
    model = small_model()
    hooks = install(model, "math")
    hooks.prepare(3)
    seen: dict[str, Any] = {}
    unwrap(model).decoder.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    tokens = torch.arange(4)[None]
    with hooks.running(context([0, 1, 2, 3])):
        model(tokens, tokens, None, labels=tokens)
    assert seen["packed_seq_params"] is None
