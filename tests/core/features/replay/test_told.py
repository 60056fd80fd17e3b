"""What routers have been told, by trainers' own RouterReplay and queues: stand-ins of these."""

import os
import sys
import types
from enum import Enum
from types import SimpleNamespace

import pytest
import torch

from megatron_prefix.features.replay import swaps, told

ROUTES = torch.tensor([[3, 1], [0, 2], [1, 0]])


class Action(Enum):
    REPLAY_FORWARD = "replay_forward"
    REPLAY_BACKWARD = "replay_backward"


class WithMask:
    """A RouterReplay as verl has it: with a mask of the positions that follow."""

    def __init__(self):
        self.target_topk_idx = self.target_replay_mask = self.router_replay_action = None
        self.replay_backward_list = []
        self.replay_backward_mask_list = []

    def set_target_indices(self, routes, replay_mask=None):
        self.target_topk_idx, self.target_replay_mask = routes, replay_mask
        self.replay_backward_list.append(routes)
        self.replay_backward_mask_list.append(replay_mask)

    def set_router_replay_action(self, action):
        self.router_replay_action = action


class Entries:
    """A queue as slime and miles have it; `current` is that of the router that runs."""

    current = None

    def __init__(self, *entries):
        self.top_indices_list, self.forward_index, self.backward_index = [*entries], 0, 0

    def pop(self, name):
        place = getattr(self, name)
        setattr(self, name, place + 1)
        return self.top_indices_list[place]


def router(**having):
    return types.SimpleNamespace(**having)


def test_rows_behind_a_mask_are_the_routers_own_choice():
    replay = WithMask()
    one = router(router_replay=replay)
    assert told.told(one, 0) is None
    replay.set_target_indices(ROUTES, torch.tensor([True, False, True]))
    replay.set_router_replay_action(Action.REPLAY_FORWARD)
    found = told.told(one, 0)
    assert found is not None and found.action == told.FORWARD
    assert found.routes.tolist() == [[3, 1], [told.CHOOSES] * 2, [1, 0]]
    before = {name: value for name, value in vars(replay).items() if name != "target_topk_idx"}
    with told.replays_of(one).following(found.routes[1:], found):
        assert replay.target_topk_idx.tolist() == [[0, 0], [1, 0]]
        assert replay.target_replay_mask.tolist() == [False, True]
        assert len(replay.replay_backward_list) == 1 and replay.target_topk_idx is not ROUTES
    assert replay.target_topk_idx is ROUTES
    assert {name: vars(replay)[name] for name in before} == before


def test_lists_for_backwards_are_empty_after_them():
    """As the stock schedule leaves them, whose backwards take an entry each."""
    replay = WithMask()
    replay.replay_backward_list[:] = [ROUTES, ROUTES + 4]
    replays = told.replays_of(router(router_replay=replay))
    replays.passed(2, backward=False)
    assert len(replay.replay_backward_list) == 2
    replays.passed(2, backward=True)
    assert replay.replay_backward_list == []


def stages(kind, patch):
    """What reads and what sets the stage of all queues, of slime or of miles."""
    if kind == "slime":
        name = "ROUTING_REPLAY_STAGE"
        patch.setenv("ENABLE_ROUTING_REPLAY", "1")
        return lambda: os.environ[name], lambda stage: patch.setenv(name, stage)
    manager = SimpleNamespace(stage="fallthrough", enabled=True)
    module = types.ModuleType("miles.utils.replay_base")
    vars(module).update(routing_replay_manager=manager, all_replay_managers=[manager])
    patch.setitem(sys.modules, module.__name__, module)
    patch.setattr(Entries, "__module__", module.__name__)
    return lambda: manager.stage, lambda stage: setattr(manager, "stage", stage)


@pytest.mark.parametrize("kind", ["slime", "miles"])
def test_a_queue_tells_the_entry_of_each_microbatch(kind, monkeypatch):
    _, set_stage = stages(kind, monkeypatch)
    queue = Entries(ROUTES + 4, ROUTES, ROUTES + 8)
    queue.forward_index, one = 1, router(routing_replay=queue)
    set_stage("fallthrough")
    assert told.told(one, 0) is None
    set_stage("record")
    assert told.told(one, 0).action == told.RECORD
    set_stage("replay_forward")
    first, second, behind = (told.told(one, number) for number in range(3))
    assert first.routes.equal(ROUTES) and second.routes.equal(ROUTES + 8)
    assert behind.routes is None
    set_stage("replay_backward")
    replays = told.replays_of(one)
    with replays.following(ROUTES[:2], first):
        assert told.told(one, 0).action == told.FORWARD
        assert queue.top_indices_list[queue.forward_index].equal(ROUTES[:2])
        queue.forward_index += 1
    assert told.told(one, 0).action == "REPLAY_BACKWARD"
    assert (len(queue.top_indices_list), queue.forward_index) == (3, 1)
    replays.passed(2, backward=False)
    assert (queue.forward_index, queue.backward_index) == (3, 0)
    replays.passed(2, backward=True)
    assert (queue.forward_index, queue.backward_index) == (5, 2)


def test_the_stage_of_miles_is_each_suspended_steps_own(monkeypatch):
    _, set_stage = stages("miles", monkeypatch)
    (manager,) = told.managers()
    set_stage("replay_backward")
    swap = swaps.stages_of_queues()
    assert swap(None, True) is None
    set_stage("replay_forward")  # as a forward step does before its model call
    kept = swap(None, False)
    assert manager.stage == "replay_backward"
    swap(kept, True)
    assert manager.stage == "replay_forward"


def test_what_a_step_adds_for_its_backward_waits_with_it():
    replay = WithMask()
    swap = swaps.replayed_routes([router(router_replay=replay)])
    kept = []
    for number in range(2):
        swap(None, True)
        replay.set_target_indices(ROUTES + number)
        kept.append(swap(None, False))
        assert replay.replay_backward_list == []
    for number in range(2):
        swap(kept[number], True)
        assert replay.target_topk_idx.equal(ROUTES + number)
        assert replay.replay_backward_list[-1].equal(ROUTES + number)
        swap(None, False)
    assert len(replay.replay_backward_list) == 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_routes_of_every_dtype_keep_experts_and_marks(dtype):
    marks = [-1, -2, -100] if dtype.is_signed else []
    routes = torch.tensor([[0, 3, 255, *marks]], dtype=dtype)
    found = told.Told(told.FORWARD, routes).kept().routes
    routes.zero_()
    assert found is not None and found.dtype == torch.int16
    assert found.tolist() == [[0, 3, 255, *(mark + 32768 for mark in marks)]]


def test_a_queue_of_another_kind_is_not_known():
    assert told.is_known(router()) and told.is_known(router(routing_replay=Entries()))
    assert not told.is_known(router(routing_replay=[ROUTES]))
