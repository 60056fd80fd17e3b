"""Who runs a call: every way to Megatron's schedule, and the way to segments."""

from __future__ import annotations

import collections
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare, refused
from megatron_prefix.plan.gate import Decision
from megatron_prefix.refusals.table import NO_CALL
from megatron_prefix.run import route as routes
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.request import STEPS, Backoff, Request, StepKind
from megatron_prefix.run.route import Share, Stock, Watch, route
from tests.harness.one_rank import one_rank, small_model


@pytest.fixture(autouse=True)
def _first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What watches a step says only whether its forward steps are suspended."""
    monkeypatch.setattr(routes, "FirstStep", lambda _, **options: SimpleNamespace(**options))


def request_of(kind: StepKind, *, experts: Any = None, may_cross: bool = False) -> Request:
    rank: Any = SimpleNamespace(experts=experts)
    part: Any = SimpleNamespace(meets_data_ranks=may_cross)
    return Request({}, rank, kind, Callbacks(), (part,))


def taken(request: Request, mode: str, *, looks_first: bool = True) -> Any:
    return route(request, PrefixConfig(mode=mode), looks_first=looks_first)


@pytest.mark.parametrize("mode", ["auto", "observe"])
def test_the_first_step_of_a_kind_is_watched(mode: str) -> None:
    way = taken(request_of(StepKind(None)), mode)
    assert isinstance(way, Watch) and not way.first.suspended
    assert taken(request_of(StepKind(None)), mode, looks_first=False) == Share(None)


def test_in_mode_on_it_is_shared_meanwhile() -> None:
    way = taken(request_of(StepKind(None)), "on")
    assert isinstance(way, Share) and way.first is not None and way.first.suspended


@pytest.mark.parametrize("rank", [{"experts": object()}, {"may_cross": True}])
def test_ranks_that_meet_in_segments_watch_it_with_stock(rank: dict[str, Any]) -> None:
    assert isinstance(taken(request_of(StepKind(None), **rank), "on"), Watch)


def test_a_kind_that_is_known_is_shared() -> None:
    assert taken(request_of(StepKind(Backoff(), watched=True)), "auto") == Share(None)


def test_a_kind_that_was_refused_is_stocks() -> None:
    kind = StepKind(None, watched=True, refusal=refused(NO_CALL))
    way = taken(request_of(kind), "auto")
    assert isinstance(way, Stock) and str(way.reason) == str(kind.refusal)
    assert way.reason is not kind.refusal  # raised, it would hold frames


def test_steps_that_nobody_looks_at_are_stocks() -> None:
    backoff = Backoff()
    request = request_of(StepKind(backoff, watched=True))
    backoff.begin()
    for _ in range(STEPS):
        way = taken(request, "auto")
        assert isinstance(way, Stock) and isinstance(way.reason, Decision) and way.reason.fallback
    assert taken(request, "auto") == Share(None)


def test_a_refused_first_call_leaves_no_part_out_of_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with one_rank():
        model = small_model()
        requests = routes.Requests(
            PrefixConfig(mode="auto", graph_tokens=64), collections.defaultdict(dict)
        )
        call = dict(model=model, pg_collection=None, forward_only=False, forward_step_func=route)
        monkeypatch.setattr(routes, "is_untried", lambda _: True)
        assert isinstance(requests.of(call, Callbacks()), CannotShare)
        monkeypatch.undo()
        for _ in range(2):
            request = requests.of(call, Callbacks())
            assert isinstance(request, Request)
            assert [type(part).__name__ for part in request.parts] == ["Graphs"]
