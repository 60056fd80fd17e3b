"""Routers that follow given routes: what is refused, and what they leave. Steps are rows of the
table of cases."""

import numpy as np
import pytest
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.errors import UserError
from megatron_prefix.features.experts.routers import routers as routers_in
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.lab.rl.metrics import of_report
from megatron_prefix.tree import Pairs
from tests.harness import steps
from tests.harness.one_rank import small_model
from tests.harness.trees import with_routes

LAYERS, EXPERTS, ROLLOUTS = 2, 4, 4
SIZES = {"num_layers": LAYERS, "num_moe_experts": EXPERTS}
ROUTED = {"moe_enable_routing_replay": True, "moe_router_enable_expert_bias": True,
          "moe_router_score_function": "sigmoid"}  # fmt: skip
CONTRACT = steps.Contract()
CHUNKED = PrefixConfig(min_gain=0, chunk_tokens=8, segment_tokens=24, memory="recompute")


def rollouts():
    """One group: a prompt, a turn that some share, and two that leave the routes of the others."""
    draw, found = np.random.default_rng(5), []
    prompt, turn = draw.integers(0, 60, 21), draw.integers(0, 60, 8)
    for member in range(ROLLOUTS):
        own = draw.integers(0, 60, 8 + 4 * (member % 3))
        tokens = np.concatenate([prompt, turn if member % 2 else [], own]).astype(np.int64)
        found.append(Pairs(tokens[:-1], tokens[1:], np.arange(len(tokens) - 1) >= 20))
    parts = [99] * (ROLLOUTS - 2) + [10, 24]
    return with_routes(found, LAYERS, EXPERTS, parts)


def items():
    """Microbatches, one a rollout."""
    return [steps.microbatch([pairs], "group", uid) for uid, pairs in enumerate(rollouts())]


def set_action(action):
    """What a trainer does before a pass."""
    RouterReplay.clear_global_indices()
    RouterReplay.set_global_router_replay_action(action)


@pytest.fixture(scope="module")
def model(on_one_rank):
    return small_model("tiny-moe", spec=SIZES, config_overrides=ROUTED, wrap_ddp=False)


@pytest.fixture(autouse=True)
def _nothing_set():
    yield
    set_action(None)


def run(model, made, step=CONTRACT.step):
    schedule = PrefixSchedule(CHUNKED, steps.routes_of(made))
    steps.call(schedule, step, model, made)
    return schedule


def without_routes():
    return [{k: v for k, v in item.items() if k != "routes"} for item in items()]


def test_a_trainer_that_sets_no_routes_is_told_how(model):
    set_action(RouterReplayAction.REPLAY_FORWARD)
    with pytest.raises(UserError, match=r"REPLAY_FORWARD, .* callback `routes`"):
        run(model, without_routes())
    with pytest.raises(UserError, match=r"REPLAY_FORWARD, .* before the model call"):
        steps.call(PrefixSchedule(CHUNKED), CONTRACT.step, model, items())
    set_action(RouterReplayAction.RECORD)
    with pytest.raises(UserError, match=r"records routes, .* stock schedule"):
        run(model, items())


def test_routes_of_another_model_are_refused(model):
    set_action(RouterReplayAction.REPLAY_FORWARD)
    fewer = [{**item, "routes": item["routes"][:, :, :1]} for item in items()]
    with pytest.raises(UserError, match=r"rollout 0 has routes .* \[1, 2\], the model \[2, 2\]"):
        run(model, fewer)


def test_a_router_of_multi_token_prediction_follows_no_routes(model):
    spec = {**SIZES, "mtp_num_layers": 1}
    other = small_model("tiny-moe", spec=spec, config_overrides=ROUTED, wrap_ddp=False)
    set_action(RouterReplayAction.REPLAY_FORWARD)
    with pytest.raises(UserError, match="a router of multi-token prediction that replays"):
        run(other, items())


def test_without_an_action_routers_choose_and_leave_nothing(model):
    routers = routers_in(model)

    def gradients(made):
        steps.zero_gradients(model)
        run(model, made)
        return steps.gradients(model)

    free, ignored = gradients(without_routes()), gradients(items())
    assert all(router.router_replay.target_topk_idx is None for router in routers.values())
    set_action(RouterReplayAction.REPLAY_FORWARD)
    before = [dict(vars(router.router_replay)) for router in routers.values()]
    followed = gradients(items())
    assert [vars(router.router_replay) for router in routers.values()] == before
    name = "decoder.layers.0.mlp.router.weight"
    assert_close(ignored[name], free[name], 200)
    with pytest.raises(AssertionError):
        assert_close(followed[name], free[name], 200)


def test_routes_are_ignored_if_routers_cannot_follow_them(model, monkeypatch):
    name = "prefix_sharing/unshared_by_routes"
    report = run(model, items()).report
    assert of_report(report)[name] == report.forest.unshared_by_routes > 0
    monkeypatch.setattr(model.config, "moe_enable_routing_replay", False)
    report = run(model, items()).report
    assert name not in of_report(report) and report.forest.unshared_by_routes == 0
