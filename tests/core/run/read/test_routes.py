"""Routes that routers have been told: of which layers and stages, and what is refused of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_prefix.errors import CannotShare
from megatron_prefix.features.replay import routes
from megatron_prefix.features.replay.routes import ToldRoutes
from megatron_prefix.features.replay.told import FORWARD, RECORD, Told
from megatron_prefix.run.calls import CallLayout

CPU = torch.device("cpu")
SHAPE = 3, 2
"""Layers of the whole model, and experts of a token."""


def rows(positions: int, layers: tuple[int, ...]) -> Tensor:
    """int16 [positions, layers, topk], of numbers that say whose they are."""
    found = torch.arange(positions)[:, None] + 20 * torch.tensor(layers) + 1
    return torch.stack([found, found + 100], -1).to(torch.int16)


def ranks(size: int, rank: int = 0) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def test_layers_without_a_router_have_no_routes() -> None:
    """The first layer is dense: routes of the second one are the second one's."""
    told = ToldRoutes((1, 2), (rows(4, (1, 2)), rows(3, (1, 2))), SHAPE, None)
    layouts = [CallLayout((4,), True), CallLayout((3,), True)]
    found = told.gathered(layouts, 1, ranks(1), CPU)
    assert [len(one) for one in found] == [4, 3]
    for one in found:
        assert not one[:, 0].any() and torch.equal(one[:, 1:], rows(len(one), (1, 2)))


def test_stages_may_have_different_numbers_of_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage with one layer pads its part for the exchange, not what is made of it."""
    first, second = (
        ToldRoutes(layers, (rows(4, layers),), SHAPE, None) for layers in ((0,), (1, 2))
    )
    sent: list[list[Tensor]] = [[], []]

    def exchanged(mine: Tensor, _: Any) -> Tensor:
        """What the two stages give, one after another; the second one has run before."""
        sent[0].append(mine)
        return torch.cat([mine, sent[1][len(sent[0]) - 1]])

    def noted(mine: Tensor, _: Any) -> Tensor:
        sent[1].append(mine)
        # The heads of both stages, then parts of the larger one's size.
        head = torch.tensor([[4, 1, 0, -1, -1]])
        return torch.cat([head, mine]) if len(sent[1]) == 1 else torch.cat([mine, mine])

    monkeypatch.setattr(routes, "_gathered_rows", noted)
    second.gathered((), 1, ranks(2, 1), CPU)
    monkeypatch.setattr(routes, "_gathered_rows", exchanged)
    [found] = first.gathered([CallLayout((4,), True)], 1, ranks(2), CPU)
    assert torch.equal(found, rows(4, (0, 1, 2)))


def test_what_was_told_before_the_step_is_no_microbatchs() -> None:
    """One tensor for all of them: it was set once, perhaps for the step before."""
    several = [Told(FORWARD, rows(4, (0,))[:, 0], source=source) for source in (1, 2)]
    routes._check_routes(several, ahead=False)
    with pytest.raises(CannotShare, match=r"REPLAY_FORWARD, .* before the model call"):
        routes._check_routes([several[0]] * 2, ahead=False)
    with pytest.raises(CannotShare, match="REPLAY_FORWARD"):
        routes._check_routes([several[0], several[1]._replace(routes=None)], ahead=False)


@pytest.mark.parametrize("recording", [1, 2])
def test_routers_that_record_are_refused(recording: int) -> None:
    several = [Told(FORWARD, rows(4, (0,))[:, 0], source=source) for source in (1, 2)]
    several[-recording:] = [Told(RECORD, None)] * recording
    with pytest.raises(CannotShare, match="records routes"):
        routes._check_routes(several, ahead=False)


def test_microbatches_have_routes_all_or_none() -> None:
    one = Told(FORWARD, rows(4, (0,))[:, 0], source=1)

    def told_of(*each: Told | None) -> Any:
        return routes.told_of({0: "router"}, [{0: told} for told in each])

    assert told_of(one, one) == {0: ("router", [one, one])} and told_of(None, None) == {}
    with pytest.raises(CannotShare, match="some microbatches have routes and some have none"):
        told_of(one, None)
