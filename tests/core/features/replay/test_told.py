"""What routers have been told, by trainers' own RouterReplay and queues: stand-ins of these."""

import types
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_prefix.features.replay import told
from megatron_prefix.features.replay.segments import SegmentRoutes
from tests.harness.queues import Entries, stages

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


@pytest.mark.parametrize("kind", ["slime", "miles"])
def test_the_stage_of_queues_is_put_back_after_a_segment(kind, monkeypatch):
    _, set_stage = stages(kind, monkeypatch)
    one = router(routing_replay=Entries(ROUTES))
    set_stage("replay_forward")
    found = told.told(one, 0)
    set_stage("replay_backward")
    with told.replays_of(one).following(ROUTES[:2], found):
        assert told.told(one, 0).action == told.FORWARD
    assert told.told(one, 0).action == "REPLAY_BACKWARD"


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


# Routes of segments' positions: each span's stand where its positions are, padding in between -----

ONE = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
LAYERS, TOPK = 2, 2


def span(rollouts, start, end, padded):
    return SimpleNamespace(
        rollouts=rollouts, start=start, end=end, length=end - start, padded=padded
    )


def routes_of(rollout):
    """[positions, layers, topk], of numbers that say whose they are; a trainer's marks at one."""
    found = np.arange(12)[:, None, None] + 20 * np.arange(LAYERS)[:, None] + 40 * np.arange(TOPK)
    found += 100 * (1 + rollout)
    found[3] = rollout - 2
    return found


def test_spans_of_a_segment_stand_behind_one_anothers_padding():
    segments = [
        SimpleNamespace(spans=some, padded_length=sum(one.padded for one in some))
        for some in (
            [span((0, 1), 0, 5, 8), span((), 0, 0, 4)],  # a filler has no rollouts
            [span((1,), 5, 9, 8), span((0,), 5, 12, 8)],
        )
    ]
    marked = [told.marked(torch.from_numpy(routes_of(number))).numpy() for number in range(2)]
    found = SegmentRoutes(
        SimpleNamespace(segments=segments), [SimpleNamespace(routes=routes) for routes in marked],
        (LAYERS, TOPK), SimpleNamespace(pp=ONE, cp=ONE), torch.device("cpu"),
    )  # fmt: skip
    for layer in range(LAYERS):
        router = SimpleNamespace(layer_number=1 + layer, tp_group=ONE)
        first, second = (found.of(router, n, segments[n].padded_length).tolist() for n in range(2))
        one, two, padding = routes_of(0)[:, layer], routes_of(1)[:, layer], [[*range(TOPK)]]
        assert first == [*one[:5].tolist(), *padding * 7]
        assert second == [*two[5:9].tolist(), *padding * 4, *one[5:12].tolist(), *padding]
