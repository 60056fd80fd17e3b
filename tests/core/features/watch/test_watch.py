"""Who runs the first step of a kind, and what it is given."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare, refused
from megatron_prefix.features.watch import around
from megatron_prefix.refusals.table import DATA_EXCHANGE, NO_CALL
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.report import Reports
from megatron_prefix.run.request import Request, StepKind

COSTS: Any = None


class First:
    """Instead of what watches a step: it sees what it was made with."""

    error: Any = None
    losses_exchange = False
    made: ClassVar[list[First]]

    def __init__(self, _: Request, *, suspended: bool) -> None:
        self.suspended = suspended
        type(self).made.append(self)

    def watching(self) -> Any:
        return contextlib.nullcontext()

    def forward_step(self) -> None:
        """The watched one."""

    def check(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> type[First]:
    class OfTest(First):
        made: ClassVar[list[First]] = []

    monkeypatch.setattr(around, "FirstStep", OfTest)
    monkeypatch.setattr(around, "run_stock", lambda arguments, **_: ["stock"])
    monkeypatch.setattr(around, "agree", lambda reason, *_: reason)
    return OfTest


def request_of(kind: StepKind, *, experts: Any = None, may_cross: bool = False) -> Request:
    rank: Any = SimpleNamespace(
        experts=experts, forward_only=False, language_models=(), models=(), device=None,
        same_schedule=[], companions=[],
    )  # fmt: skip
    part: Any = SimpleNamespace(meets_data_ranks=may_cross)
    return Request({}, rank, kind, Callbacks(), COSTS, (part,))


def run(mode: str, request: Request) -> tuple[Any, list[Request]]:
    """What a call returns, and the requests that may be shared."""
    requests: list[Request] = []

    def shared(request: Request) -> list[Any]:
        if request.stock is not None:
            return request.stock()
        requests.append(request)
        return ["shared"]

    watch = around.Watch(PrefixConfig(mode=mode), Reports(mode))
    return watch.shared(shared, request), requests


@pytest.mark.parametrize("mode", ["auto", "observe"])
def test_the_first_step_of_a_kind_is_stocks(first: type[First], mode: str) -> None:
    kind = StepKind(None)
    assert run(mode, request_of(kind)) == (["stock"], [])
    assert kind.watched and not first.made[0].suspended
    request = request_of(kind)
    assert run(mode, request) == (["shared"], [request])
    assert len(first.made) == 1


def test_in_mode_on_it_is_shared_meanwhile(first: type[First]) -> None:
    kind = StepKind(None)
    request = request_of(kind)
    store, (watched,) = run("on", request)
    assert store == ["shared"] and kind.watched and first.made[0].suspended
    assert watched.forward_step == first.made[0].forward_step
    assert watched.parts[1:] == request.parts
    first.made[0].error = refused(NO_CALL)
    with pytest.raises(CannotShare):
        watched.parts[0].read(None)  # type: ignore[arg-type]


def test_what_it_shows_ends_a_step_in_mode_on(first: type[First]) -> None:
    kind = StepKind(None)
    first.error = refused(NO_CALL)
    with pytest.raises(CannotShare):
        run("on", request_of(kind))
    assert kind.watched and str(kind.refusal) == str(first.error)


@pytest.mark.parametrize("rank", [{"experts": object()}, {"may_cross": True}])
def test_ranks_that_meet_in_segments_watch_it_with_stock(
    first: type[First], rank: dict[str, Any]
) -> None:
    assert run("on", request_of(StepKind(None), **rank)) == (["stock"], [])


def test_losses_that_exchange_keep_their_order(first: type[First]) -> None:
    kind, meets = StepKind(None), StepKind(None)
    first.losses_exchange = True
    run("auto", request_of(kind))
    assert kind.ordered and kind.refusal is None
    run("auto", request_of(meets, experts=object()))
    assert not meets.ordered and str(meets.refusal) == str(refused(DATA_EXCHANGE))
