"""Every rank of a step that stands says where, and what it waits for."""

import logging
import re
import time

import torch
import torch.distributed as dist

from megatron_prefix.features.watchdog import watchdog
from megatron_prefix.features.watchdog.watchdog import Watchdog
from megatron_prefix.lab import runtime
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.run.execute.inputs import SegmentInputs
from tests.core.alignment.test_dead_rank import step_of
from tests.harness.ranks import run_ranks

SOON_S, SLEEP_S = 0.3, 1.5


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
    step, stock = step_of(layout, watchdog_minutes=SOON_S / 60), SegmentInputs.call
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
    assert any(
        "F0 (segment 0, chunk 0), it stands in test_watchdog_ranks.slow" in one for one in late
    )
    pattern = r"rank 0: .*action \d+ of \d+: B.*at a message between pipeline stages, sender 1"
    assert any(re.match(pattern, one) for one in waiting), waiting


def test_a_collective_is_named_with_its_ranks():
    def stand():
        runtime.initialize(Layout(dp=2))
        kept = Kept()
        watchdog.logger.addHandler(kept)
        with Watchdog(SOON_S).step(lambda: 0.0):
            if dist.get_rank():
                time.sleep(3 * SOON_S)
            dist.all_reduce(torch.zeros(1))
        return kept.lines

    waiting, late = run_ranks(2, stand)
    assert "all_reduce of ranks 0, 1" in waiting[0]
    assert "around its schedule" in late[0] and "all_reduce" not in late[0]
