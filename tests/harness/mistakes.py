"""Mistakes with the states of recurrent layers, which a comparison must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_prefix.features.recurrent import delta
from megatron_prefix.features.recurrent.spans import Spans
from megatron_prefix.sidecar.cache import SidecarCache
from megatron_prefix.tree import payload_map


def of_states(patch: pytest.MonkeyPatch, verb: str, change: Callable[[Any], Any]) -> None:
    """Changes what the sidecar answers to recurrent layers."""
    stock = getattr(SidecarCache, verb)

    def changed(self: SidecarCache, layer: int, *args: Any) -> Any:
        answer = stock(self, layer, *args)
        return change(answer) if self.forms[layer] is payload_map.Form.SPANS else answer

    patch.setattr(SidecarCache, verb, changed)


def no_state(patch: pytest.MonkeyPatch) -> None:
    of_states(patch, "read", lambda payload: (torch.zeros_like(payload[0]), payload[1]))


def no_tail(patch: pytest.MonkeyPatch) -> None:
    of_states(patch, "read", lambda payload: (payload[0], torch.zeros_like(payload[1])))


def gradient_of_one(kept: int) -> Callable[[pytest.MonkeyPatch], None]:
    def one(sent: Any) -> Any:
        zeros = None if sent is None else [torch.zeros_like(part) for part in sent]
        if zeros is not None:
            zeros[kept] = sent[kept]
        return zeros

    return lambda patch: of_states(patch, "take", one)


def another_parent(patch: pytest.MonkeyPatch) -> None:
    made = Spans.__init__

    def wrong(self: Spans, lengths: Any, parents: Any, device: Any) -> None:
        made(self, lengths, [max(1, row - 1) if row else 0 for row in parents], device)

    patch.setattr(Spans, "__init__", wrong)


def short_tail_not_moved(patch: pytest.MonkeyPatch) -> None:
    edges = Spans.edges
    patch.setattr(Spans, "edges", lambda self, before: edges(self, before)._replace(tail=None))


def edges_not_computed_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(delta, "overwritten", lambda y, *_: y)


def gradients_of_what_is_overwritten(patch: pytest.MonkeyPatch) -> None:
    def wrong(y: torch.Tensor, places: torch.Tensor, again: torch.Tensor) -> torch.Tensor:
        change = torch.zeros_like(y)
        change[0] = change[0].index_copy(0, places, again - y[0, places].detach())
        return y + change

    patch.setattr(delta, "overwritten", wrong)
