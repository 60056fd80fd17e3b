"""What a run says at its end."""

import atexit
import logging

import pytest

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.features.totals.around import Totals
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.rl import loss, passes
from megatron_prefix.lab.verify import align
from megatron_prefix.plan.gate import Decision
from tests.harness.one_rank import small_model

pytestmark = pytest.mark.usefixtures("on_one_rank")


@pytest.fixture
def ends(monkeypatch):
    """What was registered for the end of the process."""
    registered = []
    monkeypatch.setattr(atexit, "register", registered.append)
    return registered


def test_the_end_says_how_many_steps_were_shared(ends, caplog):
    config = PrefixConfig(mode="auto", min_gain=4, kernel="math", min_speedup=1.5)
    schedule, model = PrefixSchedule(config, looks_first=True), small_model()
    raw = executed = 0
    for answers in (8, 8, 1, 8):  # one answer to a prompt has nothing to share
        items = align.microbatches([*generate(1, 60, 4, answers, vocab_size=64, seed=0)], 0)
        align.run_step(schedule, [model], items, optimize=False)
        report = schedule.report
        if report.decision.share:
            raw += report.forest.raw_tokens
            executed += report.forest.executed_tokens
    passes.run(schedule, loss.logprob_step(), [model], items, forward_only=True)
    [tell] = ends
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        tell()
    [line] = caplog.messages
    # The first step of a kind is Megatron's, and watched.
    assert line.startswith(f"megatron_prefix: 2 of 4 updates shared, {executed / raw:.0%} of their")
    assert "1 passes without gradients shared" in line


def test_calls_that_nobody_reads_are_no_updates(ends):
    schedule = PrefixSchedule(PrefixConfig(mode="auto"), looks_first=True)
    [totals] = [feature for feature in schedule.features if isinstance(feature, Totals)]
    with totals.call():
        schedule.reports.stock(Decision(False, "left alone", True, 1.0))
    assert [total.described(name) for name, total in totals.totals.items()] == [
        "1 more calls left to the stock schedule unread"
    ]


@pytest.mark.parametrize(("mode", "looks"), [("observe", True), ("off", True), ("on", False)])
def test_nothing_is_said_where_nothing_is_shared_for_a_trainer(mode, looks, ends):
    schedule = PrefixSchedule(PrefixConfig(mode=mode), looks_first=looks)
    assert not any(isinstance(feature, Totals) for feature in schedule.features) and not ends


def test_other_ranks_say_nothing(monkeypatch, caplog):
    monkeypatch.setenv("RANK", "1")
    schedule = PrefixSchedule(PrefixConfig(mode="on"), looks_first=True)
    [totals] = [feature for feature in schedule.features if isinstance(feature, Totals)]
    totals.tell()
    assert not caplog.messages
