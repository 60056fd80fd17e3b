"""Who runs a call: ways to Megatron's schedule, and the way to segments."""

from __future__ import annotations

import pytest

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import CannotShare, refused
from megatron_prefix.plan.gate import Decision
from megatron_prefix.refusals.table import NO_CALL
from megatron_prefix.run import route as routes
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.request import STEPS, Backoff, Request, StepKind
from megatron_prefix.run.route import route
from tests.harness.one_rank import one_rank, small_model


def test_a_kind_that_nothing_is_in_the_way_of_may_be_shared() -> None:
    assert route(StepKind(None)) is None
    assert route(StepKind(Backoff(), watched=True)) is None


def test_a_kind_that_was_refused_is_stocks() -> None:
    kind = StepKind(None, watched=True, refusal=refused(NO_CALL))
    reason = route(kind)
    assert str(reason) == str(kind.refusal)
    assert reason is not kind.refusal  # raised, it would hold frames


def test_steps_that_nobody_looks_at_are_stocks() -> None:
    backoff = Backoff()
    kind = StepKind(backoff, watched=True)
    backoff.begin()
    for _ in range(STEPS):
        reason = route(kind)
        assert isinstance(reason, Decision) and reason.fallback
    assert route(kind) is None


def test_a_refused_first_call_leaves_no_part_out_of_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with one_rank():
        model = small_model()
        requests = routes.Requests(PrefixConfig(mode="auto", graph_tokens=64))
        call = dict(model=model, pg_collection=None, forward_only=False, forward_step_func=route)
        monkeypatch.setattr(routes, "is_untried", lambda _: True)
        assert isinstance(requests.of(call, Callbacks()), CannotShare)
        monkeypatch.undo()
        for _ in range(2):
            request = requests.of(call, Callbacks())
            assert isinstance(request, Request)
            assert [type(part).__name__ for part in request.parts] == ["Graphs"]
