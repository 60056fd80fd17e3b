"""Mode "auto" decides on CUDA graphs by what it measures; here launches are emulated."""

import sys
from dataclasses import replace

import pytest

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.features.graphs import choice, cuda, part
from megatron_prefix.features.graphs.segment_graphs import SegmentGraphs
from megatron_prefix.features.measure import cost_meter
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.verify import align
from megatron_prefix.plan.gate import Decision
from megatron_prefix.run import parts_of_call
from tests.core.features.graphs.test_graphs import shared_step
from tests.harness.one_rank import small_model
from tests.harness.recorded import choice_of

CONFIG = PrefixConfig(
    mode="auto", min_speedup=0.01, kernel="math", min_gain=4, segment_tokens=24, memory="retain",
    graph_tokens="auto",
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("on_one_rank")


def replays(schedule, model, recorded, seed):
    """Makes a step that is shared; whether it replays a graph."""
    before = recorded.replays
    shared_step(schedule, model, seed)
    return recorded.replays > before


@pytest.mark.parametrize(("pays", "kept"), [(1e9, True), (0.0, False)])
def test_tried_after_first_steps_and_kept_if_they_pay(pays, kept, monkeypatch, recorded_graphs):
    monkeypatch.setattr(cost_meter, "EVERY", 9)
    monkeypatch.setattr(choice, "PAYS", pays)
    model, schedule = small_model(), PrefixSchedule(CONFIG)
    lengths, replayed = [], []
    for seed in range(11):
        replayed.append(replays(schedule, model, recorded_graphs, seed))
        lengths.append(choice_of(schedule).tokens)
    # On the CPU the device waits for the host in all actions; the longest have 24 positions. The
    # first step with graphs captures them, and the next two decide.
    assert lengths == [0] * 4 + [32] * 3 + [32 if kept else 0] * 4
    assert not any(replayed[:5]) and replayed[6] and replayed[10] == kept


@pytest.mark.parametrize(("given", "when"), [("auto", (0, 1, 4)), (0, (2, 3))])
def test_steps_share_until_graphs_can_be_tried(given, when, monkeypatch, recorded_graphs):
    """Where the host sets the pace, sharing may only pay with them. Others time both schedules."""
    slow = Decision(False, "slow", True, 0.8)
    monkeypatch.setattr("megatron_prefix.run.planning.decide", lambda *_: slow)
    model = small_model()
    schedule = PrefixSchedule(replace(CONFIG, min_speedup=1.0, graph_tokens=given))
    found = []
    for seed in range(7):
        groups = [*generate(2, 24, 9, 4, vocab_size=64, seed=seed)]
        align.run_step(schedule, [model], align.microbatches(groups, seed), optimize=False)
        found.append((schedule.report.decision.share, choice_of(schedule).tokens))
    lengths = [0] * 4 + [32] * 3 if given else [0] * 7
    assert found == [(step in when, length) for step, length in enumerate(lengths)]


def test_seconds_of_captures_are_left_out(monkeypatch, recorded_graphs):
    monkeypatch.setattr(choice, "PAYS", 1e-12)
    capture = SegmentGraphs.capture
    monkeypatch.setattr(SegmentGraphs, "capture", lambda *given: 1e9 + capture(*given))
    model, schedule = small_model(), PrefixSchedule(CONFIG)
    for seed in range(7):
        replays(schedule, model, recorded_graphs, seed)
    assert choice_of(schedule).tokens == 32 and not choice_of(schedule).is_open
    over = lambda _, decision, *__: replace(decision, over_limit=True)  # noqa: E731
    monkeypatch.setattr("megatron_prefix.run.planning.kept_to_limit", over)
    assert [replays(schedule, model, recorded_graphs, seed) for seed in (7, 8)] == [True, True]
    assert choice_of(schedule).tokens == 0


def test_first_steps_with_graphs_are_compared_as_well(monkeypatch, recorded_graphs):
    monkeypatch.setattr(choice, "PAYS", 1e9)
    model = small_model()
    schedule, compared = PrefixSchedule(replace(CONFIG, verify=1)), []
    for seed in range(8):
        replayed = replays(schedule, model, recorded_graphs, seed)
        if verification := schedule.report.features.get("verify"):
            assert not verification.failure
            compared.append((seed, replayed))
    assert compared == [(0, False), (5, True)]


@pytest.mark.parametrize("tokens", ["auto", 32])
def test_memory_that_is_returned_between_steps_is_for_others(tokens, monkeypatch, recorded_graphs):
    """Whoever asks for graphs has them even so."""
    monkeypatch.setattr(choice, "PAYS", 1e9)
    monkeypatch.setattr(cost_meter, "EVERY", 3)
    reserved = iter(range(100))  # twice a step: it grows, until a trainer empties the cache
    monkeypatch.setattr(cuda, "reserved_bytes", lambda _: next(reserved))
    model, schedule = small_model(), PrefixSchedule(replace(CONFIG, graph_tokens=tokens))
    replayed = []
    for seed in range(12):
        if seed == 8:
            reserved = iter(range(100))
        replayed.append(replays(schedule, model, recorded_graphs, seed))
    assert replayed[7:] == [True] * 2 + [tokens == 32] * 3


@pytest.mark.parametrize("most", [9, 0])
def test_a_capture_is_no_time_of_a_step(most, monkeypatch, recorded_graphs):
    """Unless many steps have one."""
    monkeypatch.setattr(cost_meter, "EVERY", 1)
    seen, stock = [], part.Graphs.timed

    def timed(graphs, step):
        captured = any(chunk.captured for chunk in graphs._graphs)
        seen.append((captured, stock(graphs, step)))
        return seen[-1][1]

    monkeypatch.setattr(part.Graphs, "timed", timed)
    monkeypatch.setattr(part, "MOST_CAPTURED", most)
    model, schedule = small_model(), PrefixSchedule(replace(CONFIG, graph_tokens=32))
    for prompt in (24, 24, 24, 24, 14, 14, 14, 14):
        shared_step(schedule, model, prompt=prompt)
    assert {captured for captured, _ in seen} == {True, False}
    assert all(typical == (most == 0 or not captured) for captured, typical in seen)


def test_steps_go_on_where_graphs_cannot_be_imported(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "megatron_prefix.features.graphs.part", None)
    parts_of_call._warn.cache_clear()
    schedule = PrefixSchedule(replace(CONFIG, graph_tokens=32))
    shared_step(schedule, small_model())
    assert "the use of CUDA graphs is left out: " in caplog.text


def test_the_stock_schedule_has_the_memory_of_graphs(monkeypatch, recorded_graphs):
    """Where it takes every other step, they end."""
    monkeypatch.setattr(choice, "PAYS", 1e9)
    monkeypatch.setattr(cost_meter, "EVERY", 1)
    model, schedule = small_model(), PrefixSchedule(CONFIG)
    for seed in range(8):
        shared_step(schedule, model, seed)
    for _ in range(part.MOST_MADE):
        arenas = part.graphs_of(model).arenas
        assert choice_of(schedule).tokens and any(arenas.capacity.values())
        items = align.microbatches([*generate(2, 24, 9, 4, vocab_size=64)], 0)
        align.run_step(PrefixSchedule(replace(CONFIG, mode="off")), [model], items, optimize=False)
        assert part.graphs_of(model) is None and not any(arenas.capacity.values())
        shared_step(schedule, model)
    assert not choice_of(schedule).tokens
