"""What a step leaves behind between the trainer's phases: nothing that grows, and little at all."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.host.part import HostMemory
from megatron_prefix.features.host.segment import Offloader
from megatron_prefix.lab.predict.of_rank import footprint_of_rank
from megatron_prefix.lab.predict.peak_memory import predict_memory
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.parts import Attempt
from megatron_prefix.plan.actions import Plan, policies
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.execute.memory_control import MemoryControl
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.tree import TreeOptions, build
from tests.harness import steps
from tests.harness.arenas import offloaders
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import Contract
from tests.harness.trees import flat_rollouts

WAYS: dict[str, dict[str, Any]] = {
    "retain": {"memory": "retain"},
    "recompute": {"memory": "recompute"},
    "offload": {"memory": "offload"},
    "host": {"cache_host_layers": 1},
    "stock": {"mode": "auto", "min_speedup": 1e9},
}
LITTLE = 3 << 12
"""Bytes: where runs of queries and keys begin, and the like."""


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        gc.collect()
        gc.freeze()  # what is here already is no step's, and is not looked at
        yield
        gc.unfreeze()


def held() -> int:
    """Bytes of the memory of all tensors that Python knows."""
    gc.collect()
    found = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
    parts = [one.untyped_storage() for one in found if one.layout is torch.strided]
    return sum({part.data_ptr(): part.nbytes() for part in parts}.values())


@pytest.mark.parametrize("way", WAYS)
def test_a_step_holds_next_to_nothing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither arenas nor payloads, outputs or losses; new lengths of rollouts change nothing."""
    model, contract, away = small_model(), Contract(), offloaders(monkeypatch)
    schedule = PrefixSchedule(PrefixConfig(**{"mode": "on", "min_gain": 0, **WAYS[way]}))
    steps.call(stock_schedule(), contract.step, model, steps.group(9, 2))  # rotary tables, and such
    model.zero_grad(set_to_none=True)
    before = held()
    for num in (3, 5, 4):
        steps.zero_gradients(model)
        steps.call(schedule, contract.step, model, steps.group(num, num))
        model.zero_grad(set_to_none=True)
        left = held() - before
        assert not any(one.pool.used_bytes for one in away)
        assert left <= LITTLE + sum(one.pool.num_bytes for one in away)


def test_what_a_part_has_begun_ends_where_it_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hook of it is left on a layer."""
    begin, model, contract = HostMemory.begin, small_model(), Contract()

    def fails(self: HostMemory, attempt: Attempt) -> None:
        begin(self, attempt)
        assert hooks(model) > before
        raise RuntimeError("it cannot begin")

    monkeypatch.setattr(HostMemory, "begin", fails)
    schedule = PrefixSchedule(PrefixConfig(mode="auto", min_gain=0, memory="offload"))
    before = hooks(model)
    steps.call(schedule, contract.step, model, steps.group(3, 3))
    assert "it cannot begin" in schedule.report.decision.reason  # type: ignore[union-attr]
    assert hooks(model) == before


def hooks(model: Any) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_host_memory_goes_with_the_first_step_without_offload() -> None:
    """A pass without gradients in between does not count."""
    model, kept = small_model(), dict[str, Any]()
    with_gradients, no_gradients = Rank.of([model]), Rank.of([model], forward_only=True)
    rollouts, groups = flat_rollouts(12, 6, 3, 1)
    plain = make_plan(build(rollouts, groups, TreeOptions(min_gain=0)))
    away = replace(plain, policies=policies(plain.segments, "offload"))

    def kept_after(plan: Plan, rank: Rank) -> Offloader | None:
        part = HostMemory(PrefixConfig(memory="offload"), rank, Callbacks())
        part.kept = kept
        part.prepare(plan, lambda: predict_memory(plan, footprint_of_rank(rank))[0])
        return next(iter(kept.values()), None)

    first = kept_after(away, with_gradients)
    assert first is not None
    assert kept_after(plain, no_gradients) is first
    assert kept_after(away, with_gradients) is first
    assert kept_after(plain, with_gradients) is None
    alive = weakref.ref(first)
    del first
    assert alive() is None


@pytest.mark.parametrize(
    ("reserved", "after", "returns"),
    [
        (100, 150, False),  # within the limit
        (100, 181, True),
        (200, 200, False),  # the trainer's own
        (200, 201, True),
    ],
)
def test_cached_blocks_beyond_the_limit_are_returned(
    reserved: int, after: int, returns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: after)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    for mode, wanted in (("on", False), ("auto", returns)):
        control = MemoryControl(PrefixConfig(mode=mode))
        control.limit = 120.0
        for _ in range(50):
            control.give_back(60, reserved, torch.device("cuda", 0))
        assert len(calls) == wanted  # once in so many steps


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_nothing_of_a_step_waits_for_the_collector(mode: str) -> None:
    """What is in a circle stays until Python looks for those, which trainers do seldom: batches of
    images would take ever more of the device."""
    config = PrefixConfig(mode=mode, min_gain=0, min_speedup=0.01, kernel="math")
    schedule, forward_step = PrefixSchedule(config, looks_first=mode == "auto"), Contract().step
    kept, model = list[int](), small_model()
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            steps.zero_gradients(model)
            steps.call(schedule, forward_step, model, steps.group(0, 4))
            kept.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
    finally:
        gc.enable()
    assert schedule.report is not None and schedule.report.decision.share
    assert kept[2] == kept[3]
