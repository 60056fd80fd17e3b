"""Memory of messages between data-parallel ranks: predicted, and what buffers took in a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.across.exchanges import Exchanges
from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.tree import Pairs, Segment, Span
from megatron_prefix.tree.forest import Exchange
from tests.harness import steps
from tests.harness.one_rank import small_model
from tests.harness.ranks import run_ranks
from tests.harness.steps import Contract, microbatch


def rollout(prompt: int, number: int, length: int, trained: int) -> Pairs:
    first = np.random.default_rng(prompt).integers(0, 60, length)
    last = np.random.default_rng([prompt, number]).integers(0, 60, 9)
    tokens = np.r_[first, last]
    return Pairs(tokens[:-1], tokens[1:], np.arange(len(tokens) - 1) >= trained % len(tokens))


def measured(dealt: list[list[int]], trained: int, config: PrefixConfig, layout: Layout) -> Any:
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
    assert report is not None and report.memory is not None and report.crossed is not None
    scored = sum(s.padded_length for s in report.plan.segments if s.source >= 0 and s.scored)
    states = 4 * model.config.hidden_size * scored
    return report.memory.exchanged, report.crossed.peak_bytes, states, report.memory.peak


ALL = [0, 1, 2, 3]
OWN = -4
"""Only the last positions carry loss, and no other rollout has these."""
CASES = {
    "two ranks": ([ALL, ALL], OWN, {}),
    "copies of some spans": ([[0, 1, 2, 3], [0, 2, 3], [1, 3]], OWN, {}),
    "chunks": ([ALL, ALL, ALL], OWN, {"chunk_tokens": 24}),
    "short segments": ([ALL, ALL], OWN, {"segment_tokens": 32}),
    "loss in prompts": ([ALL, ALL, ALL], 8, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_messages_take_what_is_predicted(name: str) -> None:
    dealt, trained, options = CASES[name]
    config = PrefixConfig(across_ranks="on", min_gain=0, kernel="math", **options)
    found = run_ranks(len(dealt), measured, dealt, trained, config, Layout(dp=len(dealt)))
    for predicted, taken, states, peak in found:
        # States that have come are counted with what a segment keeps.
        assert taken - states <= predicted <= taken
        assert predicted < peak
    assert sum(taken for _, taken, *_ in found) > 0


@pytest.mark.parametrize("layout", [Layout(dp=2, pp=2), Layout(dp=2, tp=2)])
def test_messages_of_stages_and_shards_take_what_is_predicted(layout: Layout) -> None:
    config = PrefixConfig(across_ranks="on", min_gain=0, kernel="math")
    found = run_ranks(4, measured, [ALL, ALL], OWN, config, layout)
    assert [taken for _, taken, *_ in found] == [predicted for predicted, *_ in found]


class Work:
    """Of a message, as NCCL has it: it says whether it has ended."""

    def __init__(self) -> None:
        self.ended = False

    def is_completed(self) -> bool:
        return self.ended


def test_what_has_left_is_dropped_without_waiting() -> None:
    work = Work()
    payload = [[(torch.zeros(6, 2),)], (torch.zeros(6, 3),), ()]
    carried: Any = SimpleNamespace(
        forms=[], gathers=False, parts=1, model=None,
        leaving=lambda *_: [payload[0][0], *payload[1:]],
    )  # fmt: skip
    begun = lambda messages: [m.works.append(work) for m in messages]  # noqa: E731
    communicator: Any = SimpleNamespace(
        known=lambda *_: None, tell_rows=lambda *_: None, exchange=begun, rank=0, ranks=[0, 1]
    )
    spans = tuple(Span(0, 2, 2, (n,)) for n in range(3))
    segments = (Segment(spans, inner=True, scored=False), Segment(spans[:1], False, False))
    exchanged = (Exchange(0, ((1, (0, 2)),), 0),)
    forest: Any = SimpleNamespace(exchanges=exchanged, segments=segments)
    exchanges = Exchanges(forest, communicator, [carried], torch.device("cpu"))
    size = 6 * 5 * 4
    exchanges.forward(0, 0, ())
    exchanges.forward(1, 0, ())
    exchanges.forward(1, 0, ())
    assert exchanges.held_bytes == exchanges.crossed.peak_bytes == size, "spans 0 and 2 are copies"
    work.ended = True
    exchanges.forward(1, 0, ())
    assert exchanges.held_bytes == 0
