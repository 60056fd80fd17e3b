"""Final hidden states that cross: which spans leave, and where gradients come back to."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.features.across import final_states
from megatron_prefix.features.across.exchanges import Exchanges
from megatron_prefix.features.across.final_states import FinalStates
from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.tree import Pairs, Segment, Span
from megatron_prefix.tree.forest import Exchange
from tests.harness import steps
from tests.harness.one_rank import small_model
from tests.harness.ranks import run_ranks
from tests.harness.steps import Contract, microbatch

LENGTHS = [[2, 3, 4], [5]]
"""Spans of two segments."""


def states(parts=1, rank=0):
    """Of one of `parts` ranks of sequence parallelism."""
    group = SimpleNamespace(size=lambda: parts, rank=lambda: rank)
    cache = SimpleNamespace(map=SimpleNamespace(lengths=LENGTHS, parts=1))
    return FinalStates(cache, group, parts > 1, {0, 1})


def computed(index):
    """[positions, 1, 2], every position another number."""
    num = sum(LENGTHS[index])
    return torch.arange(100.0 * index, 100.0 * index + 2 * num).view(num, 1, 2)


@pytest.mark.parametrize(
    ("spans", "rows"), [((0, 1, 2), range(9)), ((1,), range(2, 5)), ((0, 2), (0, 1, 5, 6, 7, 8))]
)
def test_a_peer_gets_the_states_of_its_spans(spans, rows):
    """One of three ranks may have a part of a segment in common with its owner only."""
    found = states()
    for index in range(2):
        _, taker = found.of(index)
        taker(computed(index))
    [left] = found.leaving(0, spans)
    assert torch.equal(left, computed(0)[[*rows]])
    [other] = found.leaving(1, (0,))
    assert torch.equal(other, computed(1))


def test_gradients_of_several_peers_add_up_where_their_spans_are():
    found = states()
    _, taker = found.of(0)
    taker(computed(0))
    found.add_to(0, (1, 2), (torch.full((7, 1, 2), 2.0),))
    found.add_to(0, (0, 2), (torch.full((6, 1, 2), 5.0),))
    [hidden], [gradient] = found.gradients(0)
    assert torch.equal(hidden, computed(0))
    assert gradient[:, 0, 0].tolist() == [5, 5, 2, 2, 2, 7, 7, 7, 7]
    assert found.gradients(0) == ([], [])


def test_received_states_are_a_ranks_own(monkeypatch):
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


# Memory of messages between data-parallel ranks: predicted, and what buffers took in a step -------


def rollout(prompt, number, length, trained):
    first = np.random.default_rng(prompt).integers(0, 60, length)
    last = np.random.default_rng([prompt, number]).integers(0, 60, 9)
    tokens = np.r_[first, last]
    return Pairs(tokens[:-1], tokens[1:], np.arange(len(tokens) - 1) >= trained % len(tokens))


def measured(dealt, trained, config, layout):
    """A rank's part of a step with rollouts of these prompts: the bytes that messages were
    predicted to take at most, what they took, and the bytes of final states among these."""
    runtime.initialize(layout)
    model = small_model(dtype=torch.float32, layout=layout)
    number = dist.get_rank() % layout.dp
    items = [
        microbatch([rollout(prompt, number, 60 + 20 * prompt, trained)], prompt, place)
        for place, prompt in enumerate(dealt[number])
    ]
    schedule = PrefixSchedule(config)
    steps.call(schedule, Contract().step, model, items)
    report = schedule.report
    scored = sum(s.padded_length for s in report.plan.segments if s.source >= 0 and s.scored)
    states = 4 * model.config.hidden_size * scored
    return report.memory.exchanged, report.crossed.peak_bytes, states, report.memory.peak


ALL = [0, 1, 2, 3]
OWN = -4
"""Only the last positions carry loss, and no other rollout has these."""
CASES = {
    "copies of some spans": ([[0, 1, 2, 3], [0, 2, 3], [1, 3]], OWN, {}),
    "loss in prompts": ([ALL, ALL, ALL], 8, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_messages_take_what_is_predicted(name):
    dealt, trained, options = CASES[name]
    config = PrefixConfig(across_ranks="on", min_gain=0, kernel="math", **options)
    found = run_ranks(len(dealt), measured, dealt, trained, config, Layout(dp=len(dealt)))
    for predicted, taken, states, peak in found:
        # States that have come are counted with what a segment keeps.
        assert taken - states <= predicted <= taken
        assert predicted < peak
    assert sum(taken for _, taken, *_ in found) > 0


def test_messages_of_stages_take_what_is_predicted():
    config = PrefixConfig(across_ranks="on", min_gain=0, kernel="math")
    found = run_ranks(4, measured, [ALL, ALL], OWN, config, Layout(dp=2, pp=2))
    assert [taken for _, taken, *_ in found] == [predicted for predicted, *_ in found]


class Work:
    """Of a message, as NCCL has it: it says whether it has ended."""

    def __init__(self):
        self.ended = False

    def is_completed(self):
        return self.ended


def test_what_has_left_is_dropped_without_waiting():
    work = Work()
    payload = [[(torch.zeros(6, 2),)], (torch.zeros(6, 3),), ()]
    carried = SimpleNamespace(
        forms=[], gathers=False, parts=1, model=None,
        leaving=lambda *_: [payload[0][0], *payload[1:]],
    )  # fmt: skip
    begun = lambda messages: [m.works.append(work) for m in messages]  # noqa: E731
    communicator = SimpleNamespace(
        known=lambda *_: None, tell_rows=lambda *_: None, exchange=begun, rank=0, ranks=[0, 1]
    )
    spans = tuple(Span(0, 2, 2, (n,)) for n in range(3))
    segments = (Segment(spans, inner=True, scored=False), Segment(spans[:1], False, False))
    exchanged = (Exchange(0, ((1, (0, 2)),), 0),)
    forest = SimpleNamespace(exchanges=exchanged, segments=segments)
    exchanges = Exchanges(forest, communicator, [carried], torch.device("cpu"))
    size = 6 * 5 * 4
    exchanges.forward(0, 0, ())
    exchanges.forward(1, 0, ())
    exchanges.forward(1, 0, ())
    assert exchanges.held_bytes == exchanges.crossed.peak_bytes == size, "spans 0 and 2 are copies"
    work.ended = True
    exchanges.forward(1, 0, ())
    assert exchanges.held_bytes == 0
