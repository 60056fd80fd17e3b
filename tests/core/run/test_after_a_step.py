"""What a step leaves behind between the trainer's phases: nothing that grows, and little at all."""

import copy
import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.host.part import HostMemory
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.predict.of_rank import footprint_of_rank
from megatron_prefix.lab.predict.peak_memory import predict_memory
from megatron_prefix.lab.rl.step_parts import watching
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.plan.actions import policies
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.run import request
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.execute.memory_control import MemoryControl
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.read.model_walk import WALK, ModelWalk
from megatron_prefix.run.schedule import PrefixSchedule, uncollected
from megatron_prefix.tree import TreeOptions, build
from tests.harness import steps
from tests.harness.arenas import offloaders
from tests.harness.failures import CONFIG, Fault, items
from tests.harness.one_group import run, schedule_with
from tests.harness.one_rank import small_model
from tests.harness.steps import Contract
from tests.harness.trees import flat_rollouts

pytestmark = pytest.mark.usefixtures("on_one_rank_frozen")
WAYS = {
    "retain": {"memory": "retain"}, "recompute": {"memory": "recompute"},
    "offload": {"memory": "offload"}, "host": {"cache_host_layers": 1},
    "stock": {"mode": "auto", "min_speedup": 1e9},
}  # fmt: skip
LITTLE = 3 << 12
"""Bytes: where runs of queries and keys begin, and the like."""


def held():
    """Bytes of the memory of all tensors that Python knows."""
    gc.collect()
    found = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
    parts = [one.untyped_storage() for one in found if one.layout is torch.strided]
    return sum({part.data_ptr(): part.nbytes() for part in parts}.values())


@pytest.mark.parametrize("way", WAYS)
def test_a_step_holds_next_to_nothing(way, monkeypatch):
    """Neither arenas nor payloads, outputs or losses; new lengths of rollouts change nothing."""
    model, contract, away = small_model(), Contract(), offloaders(monkeypatch)
    schedule = PrefixSchedule(PrefixConfig(**{"mode": "on", "min_gain": 0, **WAYS[way]}))
    steps.call(stock_schedule(), contract.step, model, steps.group(9, 2))  # rotary tables, and such
    model.zero_grad(set_to_none=True)
    before = held()
    for num in (3, 5, 4):
        steps.run(schedule, contract.step, model, steps.group(num, num))
        model.zero_grad(set_to_none=True)
        left = held() - before
        assert not any(one.pool.used_bytes for one in away)
        assert left <= LITTLE + sum(one.pool.num_bytes for one in away)


def test_what_a_part_has_begun_ends_where_it_cannot_begin(monkeypatch):
    """No hook of it is left on a layer."""
    begin, model, contract = HostMemory.begin, small_model(), Contract()

    def fails(self, attempt):
        begin(self, attempt)
        assert hooks(model) > before
        raise RuntimeError("it cannot begin")

    monkeypatch.setattr(HostMemory, "begin", fails)
    schedule = PrefixSchedule(PrefixConfig(mode="auto", min_gain=0, memory="offload"))
    before = hooks(model)
    steps.call(schedule, contract.step, model, steps.group(3, 3))
    assert "it cannot begin" in schedule.report.decision.reason
    assert hooks(model) == before


def hooks(model):
    return sum(len(module._forward_hooks) for module in model.modules())


def test_host_memory_goes_with_the_first_step_without_offload():
    """A pass without gradients in between does not count."""
    model, kept = small_model(), dict[str, Any]()
    with_gradients, no_gradients = Rank.of([model]), Rank.of([model], forward_only=True)
    rollouts, groups = flat_rollouts(12, 6, 3, 1)
    plain = make_plan(build(rollouts, groups, TreeOptions(min_gain=0)))
    away = replace(plain, policies=policies(plain.segments, "offload"))

    def kept_after(plan, rank):
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


@pytest.mark.parametrize(("reserved", "after", "returns"), [
    (100, 150, False),  # within the limit
    (100, 181, True),
    (200, 200, False),  # the trainer's own
    (200, 201, True),
])  # fmt: skip
def test_cached_blocks_beyond_the_limit_are_returned(reserved, after, returns, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: after)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    for mode, wanted in (("on", False), ("auto", returns)):
        control = MemoryControl(PrefixConfig(mode=mode))
        control.limit = 120.0
        for _ in range(50):
            control.give_back(60, reserved, torch.device("cuda", 0))
        assert len(calls) == wanted  # once in so many steps


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_nothing_of_a_step_waits_for_the_collector(mode):
    """What is in a circle stays until Python looks for those, which trainers do seldom: batches of
    images would take ever more of the device."""
    config = PrefixConfig(mode=mode, min_gain=0, min_speedup=0.01, kernel="math")
    schedule, forward_step = PrefixSchedule(config, looks_first=mode == "auto"), Contract().step
    kept, model = list[int](), small_model()
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            steps.run(schedule, forward_step, model, steps.group(0, 4))
            kept.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
    finally:
        gc.enable()
    assert schedule.report is not None and schedule.report.decision.share
    assert kept[2] == kept[3]


# Python's collector of cycles waits for the first action of a step, and is as before then ---------


def test_an_exception_leaves_it_on():
    with pytest.raises(ValueError, match="stop"), uncollected():
        raise ValueError("stop")
    assert gc.isenabled()


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_it_waits_for_the_first_action_only(mode):
    """In a step that the stock schedule runs it does not wait at all."""
    begun, called = [], []

    def watch(_):
        begun.append(gc.isenabled())
        return nullcontext()

    def answered(*_):
        called.append(gc.isenabled())

    schedule = PrefixSchedule(PrefixConfig(mode=mode, min_gain=0, min_speedup=1e9))
    model = small_model()
    hook = model.register_forward_hook(answered)
    with watching(schedule, watch):
        steps.call(schedule, steps.Contract().step, model, steps.group(3, 3))
    hook.remove()
    assert begun == ([False] + [True] * (len(begun) - 1) if mode == "on" else [])
    assert len(begun) > 1 or (called and all(called))
    assert gc.isenabled()


# A model that is dropped after a step is freed, whatever kept tensors of the step -----------------

EXPERTS = ("tiny-moe", "tiny-gpt-oss", "tiny-deepseek")
SCHEDULE = PrefixSchedule(CONFIG)
"""It outlives the models, as that of a process does."""


def keep_outputs(model):
    """Layers keep their output with its graph, as a trainer's probe does."""

    def keep(layer, _, output):
        layer.kept = output

    for layer in unwrap(model).decoder.layers:
        layer.register_forward_hook(keep)


def fail_in_a_segment(model):
    """The second forward of the last layer raises."""
    calls = iter([False, True])

    def count(*_):
        if next(calls, False):
            raise Fault

    unwrap(model).decoder.layers[-1].register_forward_hook(count)


def change_nothing(_):
    pass


def is_freed(schedule, name, prepare, **options):
    """Whether a model goes with its last name, after a step."""
    model = small_model(name, **options)
    prepare(model)
    gone = weakref.ref(model)
    try:
        steps.call(schedule, Contract().step, model, items())
    except Fault:
        assert prepare is fail_in_a_segment
    else:
        assert prepare is not fail_in_a_segment
    del model
    gc.collect()
    return gone() is None


CASES = [
    ("tiny-llama", fail_in_a_segment), *((name, change_nothing) for name in EXPERTS),
    ("tiny-moe", keep_outputs), ("tiny-moe", fail_in_a_segment),
]  # fmt: skip


@pytest.mark.parametrize(("name", "prepare"), CASES)
def test_a_shared_step_holds_no_model(name, prepare):
    assert is_freed(SCHEDULE, name, prepare, wrap_ddp=False)
    if prepare is not fail_in_a_segment:
        assert SCHEDULE.report is not None and SCHEDULE.report.decision.share


def test_nor_does_it_with_ddp_where_the_stock_schedules_does():
    """There hooks on gradients hold the model, and Megatron's dispatcher the graph to them."""
    assert not is_freed(stock_schedule(), "tiny-moe", change_nothing)
    assert is_freed(SCHEDULE, "tiny-moe", change_nothing)


def test_what_is_refused_of_a_model_does_not_hold_it():
    """The schedule remembers the error, not the frames that it went through."""
    schedule = PrefixSchedule(replace(CONFIG, mode="auto"), looks_first=True)
    assert is_freed(
        schedule, "tiny-llama", change_nothing, wrap_ddp=False,
        config_overrides={"hidden_dropout": 0.1},
    )  # fmt: skip
    assert schedule.report is not None and "hidden_dropout" in schedule.report.decision.reason
    strict = PrefixSchedule(CONFIG, looks_first=True)
    model = small_model(config_overrides={"hidden_dropout": 0.1}, wrap_ddp=False)
    gone = weakref.ref(model)
    for _ in range(2):
        with pytest.raises(ValueError, match="hidden_dropout"):
            steps.call(strict, Contract().step, model, items())
    del model
    gc.collect()
    assert gone() is None


def test_a_new_model_in_the_place_of_an_old_one_is_looked_at(monkeypatch):
    """Python gives the address of what has gone to what is made next."""
    monkeypatch.setattr(request, "id", lambda _: 1, raising=False)
    schedule = PrefixSchedule(replace(CONFIG, mode="auto"), looks_first=True)
    for dropout in (0.1, 0.0):
        model = small_model(config_overrides={"hidden_dropout": dropout}, wrap_ddp=False)
        steps.call(schedule, Contract().step, model, items())
        reason = schedule.report.decision.reason
        assert ("hidden_dropout" in reason) == bool(dropout)
        del model
        gc.collect()


# State that a module keeps itself, and the walk that looks for what forward steps set; rows of it:


def test_a_model_takes_its_walk_with_it():
    """What is kept between steps is the model's: no copy has it, and it holds no model."""
    model = small_model()
    run(schedule_with(looks_first=True, mode="on"), model)
    inner = unwrap(model)
    assert isinstance(vars(inner)[WALK], ModelWalk)
    made, arguments = vars(inner)[WALK].__reduce__()
    assert made(*arguments) is None
    assert copy.deepcopy({"walk": vars(inner)[WALK]}) == {"walk": None}
    alive = weakref.ref(vars(inner)[WALK])
    del vars(inner)[WALK]
    gc.collect()
    assert alive() is None
