"""Whether segments' layers run on CUDA graphs, by what was measured."""

from dataclasses import replace

import pytest

from megatron_prefix.features.graphs.choice import (
    LAUNCHES,
    MOST_LATE,
    GraphChoice,
    Needs,
    flops,
    longest_waiting,
    with_graphs,
)
from megatron_prefix.plan.actions import Action
from megatron_prefix.plan.cost import CostModel, causal_pairs
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.plan.sizes import place_of
from megatron_prefix.tree import TreeOptions, build
from tests.harness.trees import flat_rollouts


def tried(waits=900):
    """Two steps of 1.0 and 1.2 times what was predicted, without graphs."""
    choice = GraphChoice.of("auto").after(1.0, waits, may_try=False)
    assert choice.tokens == 0
    return choice.after(1.2, 100, may_try=True)


def test_graphs_are_tried_where_the_device_waits():
    assert tried().tokens == 1024  # the next power of two
    assert tried(1024).tokens == 1024
    assert GraphChoice.of("auto").after(1.0, 900, may_try=True).tokens == 0  # one step is too few


def test_nothing_is_tried_where_it_does_not():
    choice = GraphChoice.of("auto")
    for _ in range(5):
        choice = choice.after(1.0, 0, may_try=True)
    assert choice.tokens == 0 and choice.is_open


@pytest.mark.parametrize(("ratio", "tokens"), [(0.9, 1024), (0.969, 1024), (0.971, 0), (2.0, 0)])
def test_they_stay_if_steps_take_less(ratio, tokens):
    """Of 1.0, the least without them, at most 0.97."""
    first = tried().after(ratio, 0, may_try=True)
    assert first.tokens == 1024 and first.is_open == (tokens == 0)  # one slow step is too few
    choice = first.after(ratio, 0, may_try=True)
    assert choice.tokens == tokens and not choice.is_open
    assert choice.after(0.1, 4096, may_try=True) == choice


def test_steps_in_which_some_are_captured_do_not_decide():
    choice = tried()
    for _ in range(MOST_LATE):
        choice = choice.after(1.2, 0, may_try=True, captured=True)
        assert choice.tokens == 1024 and choice.is_open
    assert choice.after(0.9, 0, may_try=True, captured=True).tokens == 1024
    for captured in (True, False):  # where all steps have some, that is what they take
        again = choice.after(1.2, 0, may_try=True, captured=captured)
        assert again.tokens == 0 and not again.is_open
    unused = tried().after(0.1, 0, may_try=True, used=False)
    assert unused.tokens == 1024 and unused.is_open and unused.late == 1
    sooner = tried().after(0.9, 0, may_try=True, captured=True)
    assert sooner.tokens == 1024 and not sooner.is_open


def test_they_end_where_there_is_no_room_for_them():
    shorter = tried(1900).without_room()
    assert shorter.tokens == 1024 and shorter.is_open
    for ended in (shorter.without_room(), tried(1900).without_room(retried=True)):
        assert ended.tokens == 0 and not ended.is_open
    kept = tried(1900).after(0.9, 0, may_try=True)
    for choice in (GraphChoice.of("auto"), GraphChoice.of(64), kept):
        assert choice.without_room() == choice == choice.settled(has_room=True)
    # Settled before it is known what they hold: the second step without room opens it again.
    assert (once := kept.settled(has_room=False)).settled(has_room=False) == shorter
    assert once.settled(has_room=True) == once and (once.tokens, once.is_open) == (2048, False)
    assert GraphChoice.of(64).settled(has_room=False) == GraphChoice.of(64)


def test_places_that_just_hold_what_waits_come_first():
    """A prompt of 10,239 positions needs none of 16,384."""
    close = tried(10239).without_room(known=False)
    assert (close.tokens, close.guessed, close.is_open) == (10240, 0, True)
    assert close.after(0.9, 0, may_try=True) == replace(close, is_open=False)
    shorter = close.without_room(known=False)
    assert (shorter.tokens, shorter.guessed) == (8192, 10240)
    assert shorter.without_room(known=False).guessed == 10240
    # Too slow where room is short: with half as long ones plans differ; they are tried as well.
    slow = close.after(1.2, 0, may_try=True).after(1.2, 0, may_try=True)
    assert (slow.tokens, slow.late, slow.slow, slow.is_open) == (8192, 0, 0, True)
    ended = slow.after(1.2, 0, may_try=True).after(1.2, 0, may_try=True)
    assert ended.tokens == 0 and not ended.is_open
    close = [tried(waits).without_room().tokens for waits in (8193, 10241, 14336, 14337, 16384)]
    assert close == [10240, 12288, 14336, 8192, 8192]


def test_what_had_no_room_by_a_guess_is_tried_once_more():
    """By what the graphs of shorter segments hold."""
    shorter = tried(4000).without_room(known=False).without_room(known=False)
    assert shorter.tokens == 1024
    assert shorter.after(1.2, 0, may_try=True, used=False).tokens == 1024
    again = shorter.after(1.2, 0, may_try=True, captured=True)
    assert (again.tokens, again.is_open, again.late) == (4096, True, 1)
    assert shorter.after(0.9, 0, may_try=True) == replace(shorter, is_open=False)  # they pay
    assert again.after(0.9, 0, may_try=True) == replace(again, is_open=False)
    still = again.without_room()
    assert still.tokens == 2048 == still.after(1.2, 0, may_try=True, captured=True).tokens
    for _ in range(MOST_LATE + 1):  # nothing is ever known: that ends, too
        shorter = shorter.without_room(known=False).after(1.2, 0, may_try=True, captured=True)
    assert shorter.tokens == 0 and not shorter.is_open


def test_launches_take_less_with_graphs():
    prices = tuple(map(float, range(1, 13)))
    changed = with_graphs(CostModel(prices, 1.5, 0.8)).prices
    assert changed == tuple(one * (LAUNCHES if one in (4, 5, 10, 11) else 1) for one in prices)


def test_steps_are_compared_by_what_they_compute_once():
    rollouts, groups = flat_rollouts(400, 100, 4, 1)
    plans = [
        make_plan(build(rollouts, groups, TreeOptions(segment_tokens=most))) for most in (400, 100)
    ]
    once = [flops(plan, CostModel.of_flops(1.0, 10.0, 0.1)) for plan in plans]
    positions, scored = 400 + 4 * 100, 4 * 100
    pairs = causal_pairs(0, 400) + 4 * causal_pairs(400, 100)
    assert once == pytest.approx([positions + 10 * scored + 0.1 * pairs] * 2, rel=0.01)
    assert len(plans[0].segments) < len(plans[1].segments)


def test_places_are_for_segments_about_as_long():
    sizes = {length: place_of(length, 64) for length in (64, 33, 32, 17, 16, 2, 1)}
    assert sizes == {64: 64, 33: 64, 32: 32, 17: 32, 16: 16, 2: 2, 1: 1}
    assert place_of(20, 48) == place_of(24, 48) == 24 and place_of(25, 48) == 48
    assert all(length <= place_of(length, most) for most in (48, 50) for length in range(1, most))


def test_a_plan_needs_places_of_its_segments():
    rollouts, groups = flat_rollouts(400, 100, 4, 1)
    options = TreeOptions(segment_tokens=200, chunk_tokens=100)
    plan = make_plan(build(rollouts, groups, options))
    num = len(plan.segments)
    inner = [n for n, segment in enumerate(plan.segments) if segment.inner]
    lengths = [plan.segments[n].padded_length for n in range(num)]
    longest = max(lengths[n] for n in range(num) if n not in inner)

    def needs(policy_of, most=1024):
        return Needs.of(replace(plan, policies=tuple(map(policy_of, range(num)))), most)

    places = tuple(place_of(lengths[n], 1024) for n in inner)
    retained = needs(lambda n: "retain")
    assert retained == (place_of(longest, 1024), place_of(longest, 1024), places, True)
    assert needs(lambda n: "recompute_act") == (place_of(longest, 1024), 0, places, False)
    again = needs(lambda n: "recompute" if n in inner else "recompute_act")
    most = place_of(max(lengths), 1024)
    assert again == (most, place_of(max(lengths[n] for n in inner), 1024), (), False)
    assert needs(lambda n: "retain", most=1) == (0, 0, (), False)


def test_the_longest_segment_that_waits():
    rollouts, groups = flat_rollouts(400, 100, 4, 1)
    plan = make_plan(build(rollouts, groups, TreeOptions(segment_tokens=200)))
    [actions] = plan.programs
    device = dict.fromkeys(actions, 1.0)
    lengths = {one: plan.segments[one.segment].padded_length for one in actions}
    assert len({*lengths.values()}) > 1
    shortest = min(lengths.values())

    def host(waiting, kind, most):
        short = {one for one in actions if one.kind == kind and lengths[one] <= most}
        return {one: waiting if one in short else 0.1 for one in actions}

    assert longest_waiting(plan, device, host(0.95, "F", shortest)) == shortest
    assert longest_waiting(plan, device, host(0.95, "F", 10**6)) == max(lengths.values())
    assert longest_waiting(plan, device, host(0.8, "F", 10**6)) == 0
    assert longest_waiting(plan, device, host(0.95, "B", 10**6)) == 0
    assert longest_waiting(plan, device, host(0.95, "B", shortest), "B") == shortest
    kept = [lengths[Action("F", index)] == shortest for index in range(len(plan.segments))]
    apart = replace(plan, policies=tuple("retain" if one else "offload" for one in kept))
    assert longest_waiting(apart, device, host(0.95, "F", 10**6)) == shortest
    both = zip(plan.segments, kept, strict=True)
    sent = replace(plan, segments=tuple(s if one else s._replace(source=1) for s, one in both))
    assert longest_waiting(sent, device, host(0.95, "F", 10**6)) == shortest
    waiting = {one: 0.01 if one.kind == "F" else 1.0 for one in actions}
    assert longest_waiting(plan, waiting, waiting) == 0  # a small part of the step
