"""What a step offloads of a real model, and what never."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.host.segment import OffloadedSegment, addresses
from megatron_prefix.features.host.transfers import Transfers
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.rl.step_parts import watching
from megatron_prefix.lab.verify import align
from megatron_prefix.plan.actions import Plan
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness.arenas import offloaders, watch_arenas
from tests.harness.failures import CONFIG, run
from tests.harness.one_rank import one_rank, small_model
from tests.harness.predicted import predicted_bytes


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_neither_weights_nor_cached_keys_and_nothing_twice(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached: set[int] = set()
    held: list[Any] = []  # an address names a tensor only as long as that lives
    stored: list[int] = []
    num_layers: dict[int, int] = {}

    def seen(payload: Tensor) -> None:
        held.append(payload)
        cached.update(addresses(payload))

    def store(self: Transfers, pairs: Any) -> None:
        for device, host in pairs:
            held.append(device)
            stored.append(device.untyped_storage().data_ptr())
            host.copy_(device)

    done = OffloadedSegment.layer_done

    def layer_done(self: OffloadedSegment) -> None:
        before = len(stored)
        done(self)
        num_layers[id(self)] = num_layers.get(id(self), 0) + (len(stored) > before)
        held.append(self)

    watch_arenas(monkeypatch, seen)
    monkeypatch.setattr(Transfers, "store", store)
    monkeypatch.setattr(OffloadedSegment, "layer_done", layer_done)
    model = small_model(recompute=recompute)
    plan = plan_of_offloaded_step(model)
    inner = unwrap(model)
    weights = addresses(*inner.parameters(), *inner.buffers())
    assert len(cached) == 2 * 2 * num_arenas(plan) and len(stored) > 10  # K and V of two layers
    assert len(stored) == len(set(stored))
    assert not set(stored) & (cached | weights)
    # Inner segments of two trees; two layers each, and what follows the last.
    assert len(num_layers) == sum(segment.inner for segment in plan.segments) >= 10
    assert set(num_layers.values()) <= {2, 3}


def plan_of_offloaded_step(model: Any) -> Plan:
    schedule = PrefixSchedule(replace(CONFIG, memory="offload"))
    run(schedule, model)
    assert schedule.report is not None
    return schedule.report.plan


def num_arenas(plan: Plan) -> int:
    """How often a layer takes an arena: for an inner segment, when no other one waits."""
    found = waiting = 0
    for action in plan.programs[0]:
        if plan.segments[action.segment].inner:
            found += action.kind == "F" and not waiting
            waiting += 1 if action.kind == "F" else -1
    return found


def test_a_segment_is_loaded_in_the_backward_before_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not while other segments' forwards still want the memory."""
    early_in, running, prefetch = set(), [""], OffloadedSegment.prefetch

    def watch(action: Any) -> Any:
        running[0] = str(action)
        return contextlib.nullcontext()

    def recorded(self: OffloadedSegment, *, early: bool = False) -> None:
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
