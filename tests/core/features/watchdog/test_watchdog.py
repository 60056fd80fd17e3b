"""A step that stands says where, on every rank, and what it waits for; others say nothing, and none
leaves a thread."""

import itertools
import logging
import re
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_prefix.features.watchdog import watchdog
from megatron_prefix.features.watchdog.watchdog import Watchdog
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.rl import passes
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.run import planning
from megatron_prefix.run.execute.inputs import SegmentInputs
from megatron_prefix.run.schedule import PrefixSchedule
from tests.core.alignment.test_dead_rank import step_of
from tests.harness import steps
from tests.harness.failures import CONFIG, Fault, items, raised
from tests.harness.one_rank import small_model
from tests.harness.ranks import run_ranks

RANKS_SOON_S, SLEEP_S = 0.3, 1.5


class Kept(logging.Handler):
    """Keeps lines."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def step_with_a_slow_rank(layout, late):
    """A rank's part: one of them sleeps in its first segment, and what each says."""
    kept = Kept()
    watchdog.logger.addHandler(kept)
    step, stock = step_of(layout, watchdog_minutes=RANKS_SOON_S / 60), SegmentInputs.call
    sleeps = [SLEEP_S] if dist.get_rank() == late else []

    def slow(*args, **options):
        if sleeps:
            time.sleep(sleeps.pop())
        return stock(*args, **options)

    SegmentInputs.call = slow
    step()
    return kept.lines


def test_every_rank_of_a_pipeline_says_what_it_waits_for():
    waiting, late = run_ranks(2, step_with_a_slow_rank, Layout(pp=2), 1)
    assert any("F0 (segment 0, chunk 0), it stands in test_watchdog.slow" in one for one in late)
    pattern = r"rank 0: .*action \d+ of \d+: B.*at a message between pipeline stages, sender 1"
    assert any(re.match(pattern, one) for one in waiting), waiting


def test_a_collective_is_named_with_its_ranks():
    def stand():
        runtime.initialize(Layout(dp=2))
        kept = Kept()
        watchdog.logger.addHandler(kept)
        with Watchdog(RANKS_SOON_S).step(lambda: 0.0):
            if dist.get_rank():
                time.sleep(3 * RANKS_SOON_S)
            dist.all_reduce(torch.zeros(1))
        return kept.lines

    waiting, late = run_ranks(2, stand)
    assert "all_reduce of ranks 0, 1" in waiting[0]
    assert "around its schedule" in late[0] and "all_reduce" not in late[0]


SOON_S = 0.4
SOON = SOON_S / 60
WATCHED = replace(CONFIG, watchdog_minutes=SOON)
LOGGER = "megatron_prefix.features.watchdog.watchdog"


@pytest.fixture(scope="module")
def model(on_one_rank):
    return small_model()


def threads():
    return [one.name for one in threading.enumerate() if one.name == "watchdog"]


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def standing(function):
    """The function, whose first call stands until a line must have been written."""
    calls = iter([True])

    def slow(*args, **kwargs):
        if next(calls, False):
            time.sleep(1.6 * SOON_S)
        return function(*args, **kwargs)

    return slow


PLACES = {
    "planning": (planning.Planning, "decided", "planning"),
    "a segment": (SegmentInputs, "call", "in the prefix schedule, action 1 of"),
}


@pytest.mark.parametrize("where", PLACES)
def test_a_step_says_where_it_stands(where, model, monkeypatch, caplog):
    owner, name, says = PLACES[where]
    monkeypatch.setattr(owner, name, standing(getattr(owner, name)))
    steps.call(PrefixSchedule(WATCHED), steps.Contract().step, model, items())
    line, *_ = lines(caplog)
    assert line.startswith("rank 0: a step has taken ")
    assert says in line and "it stands in test_watchdog.slow:" in line
    assert re.search(r"action 1 of \d+: F0 \(segment 0, chunk 0\)", line) or where != "a segment"
    assert "\n" not in line and not threads()


def test_the_stock_schedules_steps_are_watched(model, monkeypatch, caplog):
    """Those of mode auto, and of verbs, which call it themselves."""
    layer = unwrap(model).decoder.layers[1]
    config = replace(WATCHED, mode="auto", min_speedup=1e9)
    schedule = PrefixSchedule(config, looks_first=True)
    monkeypatch.setattr(layer, "forward", standing(layer.forward))
    steps.call(schedule, steps.Contract().step, model, items())
    first, *_ = lines(caplog)
    caplog.clear()
    monkeypatch.setattr(layer, "forward", standing(layer.forward))
    with passes.watching(stock_schedule(), SOON):
        steps.call(stock_schedule(), steps.Contract().step, model, items())
    for line in (first, lines(caplog)[0]):
        assert "in the stock schedule, it stands in test_watchdog.slow:" in line
        assert "(layer 2)" in line  # as Megatron counts


def test_a_step_that_fails_leaves_no_thread(model, monkeypatch, caplog):
    def fail(*_, **__):
        assert threads() == ["watchdog"]
        raise Fault

    schedule = PrefixSchedule(CONFIG)
    monkeypatch.setattr(SegmentInputs, "call", fail)
    raised(Fault, steps.call, schedule, steps.Contract().step, model, items())
    assert not threads()
    monkeypatch.undo()
    steps.call(schedule, steps.Contract().step, model, items())
    assert not threads() and not lines(caplog)


@pytest.mark.parametrize(
    "config", [replace(WATCHED, watchdog_minutes=0), replace(WATCHED, mode="off")]
)
def test_nothing_is_watched_where_nobody_wants_it(config, model, monkeypatch):
    layer, seen = unwrap(model).decoder.layers[1], []
    handle = layer.register_forward_hook(lambda *_: seen.extend(threads()))
    steps.call(PrefixSchedule(config), steps.Contract().step, model, items())
    handle.remove()
    assert not seen


def test_lines_come_at_growing_intervals(caplog):
    with Watchdog(0.1).step(lambda: 0.0):
        time.sleep(0.8)
    # After 0.1, 0.2 and 0.4 s, or later on a busy machine: each after twice the time so far.
    waited = [float(re.search("has taken (\\S+) s", line)[1]) for line in lines(caplog)]
    assert len(waited) >= 2 and waited[0] >= 0.1
    assert all(later >= 1.95 * sooner for sooner, later in itertools.pairwise(waited))


def test_usual_and_predicted_times_are_waited_for(caplog):
    dog = Watchdog(0.05)
    for predicted, usual in ((9.0, 0.0), (0.0, 0.2)):
        with dog.step(lambda predicted=predicted: predicted):
            time.sleep(0.2)
        assert not lines(caplog) or usual
    with dog.step(lambda: 0.0):  # ten times the step before is two seconds
        time.sleep(0.5)
    assert not lines(caplog)


def test_a_step_within_a_watched_one_is_part_of_it():
    with Watchdog(9.0).step(lambda: 0.0), Watchdog(9.0).step(lambda: 0.0):
        assert threads() == ["watchdog"]
    assert not threads()
