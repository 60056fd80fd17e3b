"""What a step offloads of a real model, and what never."""

import contextlib

import pytest

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.features.host.segment import OffloadedSegment
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.rl.step_parts import watching
from megatron_prefix.lab.verify import align
from tests.harness.arenas import offloaders
from tests.harness.one_rank import small_model
from tests.harness.predicted import predicted_bytes

pytestmark = pytest.mark.usefixtures("on_one_rank")


def test_a_segment_is_loaded_in_the_backward_before_its_own(monkeypatch):
    """Not while other segments' forwards still want the memory."""
    early_in, running, prefetch = set(), [""], OffloadedSegment.prefetch

    def watch(action):
        running[0] = str(action)
        return contextlib.nullcontext()

    def recorded(self, *, early=False):
        before = offloading[0].counts.prefetched
        prefetch(self, early=early)
        if early and offloading[0].counts.prefetched > before:
            early_in.add(running[0])

    offloading = offloaders(monkeypatch)
    monkeypatch.setattr(OffloadedSegment, "prefetch", recorded)
    groups = list(generate(2, 60, 4, 3, vocab_size=64))  # prompts that pay for their action
    config = PrefixConfig(memory="offload", kernel="math", min_gain=3, segment_tokens=4, mode="on")
    schedule = PrefixSchedule(config)
    with predicted_bytes(), watching(schedule, watch):
        align.run_step(schedule, [small_model()], align.microbatches(groups, 0))
    program = [str(action) for action in schedule.report.plan.programs[0]]
    prompts = [f"B{n}" for n, s in enumerate(schedule.report.plan.segments) if s.inner]
    assert len(prompts) == 2
    assert early_in == {program[program.index(prompt) - 1] for prompt in prompts}
    assert all(action.startswith("B") for action in early_in)
    # Two prompts are on the host at once, one after the other or together: as the plan says.
    staged = schedule.report.memory.staged
    assert 0.9 <= offloading[0].counts.stored / len(prompts) / staged <= 1.1
