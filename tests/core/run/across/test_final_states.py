"""Final hidden states that cross: which spans leave, and where gradients come back to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_prefix.features.across import final_states
from megatron_prefix.features.across.final_states import FinalStates

LENGTHS = [[2, 3, 4], [5]]
"""Spans of two segments."""


def states(parts: int = 1, rank: int = 0) -> FinalStates:
    """Of one of `parts` ranks of sequence parallelism."""
    group: Any = SimpleNamespace(size=lambda: parts, rank=lambda: rank)
    cache: Any = SimpleNamespace(map=SimpleNamespace(lengths=LENGTHS, parts=1))
    return FinalStates(cache, group, parts > 1, {0, 1})


def computed(index: int) -> torch.Tensor:
    """[positions, 1, 2], every position another number."""
    num = sum(LENGTHS[index])
    return torch.arange(100.0 * index, 100.0 * index + 2 * num).view(num, 1, 2)


@pytest.mark.parametrize(
    ("spans", "rows"), [((0, 1, 2), range(9)), ((1,), range(2, 5)), ((0, 2), (0, 1, 5, 6, 7, 8))]
)
def test_a_peer_gets_the_states_of_its_spans(spans: tuple[int, ...], rows: Any) -> None:
    """One of three ranks may have a part of a segment in common with its owner only."""
    found = states()
    for index in range(2):
        _, taker = found.of(index)
        assert taker is not None
        taker(computed(index))
    [left] = found.leaving(0, spans)
    assert torch.equal(left, computed(0)[[*rows]])
    [other] = found.leaving(1, (0,))
    assert torch.equal(other, computed(1))


def test_gradients_of_several_peers_add_up_where_their_spans_are() -> None:
    found = states()
    _, taker = found.of(0)
    assert taker is not None
    taker(computed(0))
    found.add_to(0, (1, 2), (torch.full((7, 1, 2), 2.0),))
    found.add_to(0, (0, 2), (torch.full((6, 1, 2), 5.0),))
    [hidden], [gradient] = found.gradients(0)
    assert torch.equal(hidden, computed(0))
    assert gradient[:, 0, 0].tolist() == [5, 5, 2, 2, 2, 7, 7, 7, 7]
    assert found.gradients(0) == ([], [])


def test_received_states_are_a_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a view of what has arrived, whose memory is used again; gradients go back whole."""
    found = states(parts=3, rank=1)
    payload = computed(0)
    found.arrived(0, (payload,))
    assert [*found.fresh()] == [0] and not [*found.fresh()]
    hidden, _ = found.of(0)
    assert hidden is not None and hidden.requires_grad
    payload.zero_()
    assert torch.equal(hidden.detach(), computed(0)[3:6])
    monkeypatch.setattr(
        final_states,
        "gather_from_sequence_parallel_region",
        lambda part, group: part.repeat(group.size(), 1, 1),
    )
    found.head_backward = lambda _: hidden.backward(torch.full_like(hidden, 3.0))
    [sent] = found.sums(0)
    assert torch.equal(sent, torch.full((9, 1, 2), 3.0))
