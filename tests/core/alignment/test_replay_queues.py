"""Routers that take their routes from a queue inside Megatron's top-k, as in slime and in miles:
stand-ins of theirs."""

import types
from dataclasses import replace

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe import router as megatron_router

from megatron_prefix.features.experts.routers import routers as routers_in
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.refusals.table import TWO_CALLS
from megatron_prefix.run.schedule import PrefixSchedule
from tests.core.alignment.test_replay import CHUNKED, CONTRACT, SIZES, items
from tests.core.features.replay.test_told import Entries, stages
from tests.harness import steps
from tests.harness.ranks import run_ranks

CASES = {
    "one rank": (Layout(), "none"),
    "PP2, full recompute": (Layout(pp=2), "full"),
    "TP2, full recompute": (Layout(tp=2, sequence_parallel=True), "full"),
    "EP2": (Layout(dp=2, ep=2), "none"),
}


def put_into(model, stage):
    """Queues for the routers of a model."""
    stock, queues = megatron_router.topk_routing_with_score_function, []

    def topk(scores, num, groups, group_topk, choose):
        name = {"replay_forward": "forward_index", "replay_backward": "backward_index"}[stage()]
        routes = Entries.current.pop(name)
        assert routes.shape == (len(scores), num)
        return scores.gather(1, routes), routes

    def routed(*args, **options):
        queue = types.SimpleNamespace(get_replay_topk=topk)
        return stock(*args, **options | {"router_replay": queue})

    megatron_router.topk_routing_with_score_function = routed
    for router in routers_in(unwrap(model)).values():
        router.routing_replay = queue = Entries()
        queues.append(queue)
        router.register_forward_pre_hook(lambda *_, queue=queue: setattr(Entries, "current", queue))
    return queues


def compare(name, kind):
    """Compares an update with stock's; executed positions, and those not shared."""
    layout, recompute = CASES[name]
    runtime.initialize(layout)
    spec = resolve("tiny-moe", **SIZES, moe_aux_loss_coeff=1.0).with_vocab(64)
    (model,) = build_model(spec, layout=layout, dtype="float64", recompute=recompute)
    now, set_stage = stages(kind, pytest.MonkeyPatch())
    queues, made = put_into(model, now), items()

    def fill():
        for queue, router in zip(queues, routers_in(unwrap(model)).values(), strict=True):
            vars(queue).update(vars(Entries()))
            for item in made:
                rows = item["routes"][0, :, router.layer_number - 1].long()
                parts = rows.chunk(router.tp_group.size())
                queue.top_indices_list.append(parts[router.tp_group.rank()])

    def step(data_iterator, of_model):
        set_stage("replay_forward")
        found = CONTRACT.step(data_iterator, of_model)
        set_stage("replay_backward")
        return found

    ours, found = PrefixSchedule(CHUNKED), []
    for schedule in (get_forward_backward_func(), ours):
        fill()
        set_stage("replay_backward")
        found.append(steps.run(schedule, step, model, made).gradients)
        assert [queue.forward_index for queue in queues] == [len(made)] * len(queues)
        if recompute == "full":
            assert [queue.backward_index for queue in queues] == [len(made)] * len(queues)
    steps.assert_gradients(found[1], found[0], 200)
    forest = ours.report.forest
    return forest.executed_tokens, forest.raw_tokens


def reference_with_entries():
    """A queue has entries for a call without gradients, too, which is made before a step's own."""
    runtime.initialize(Layout())
    (model,) = build_model(resolve("tiny-moe", **SIZES).with_vocab(64), layout=Layout())
    now, set_stage = stages("slime", pytest.MonkeyPatch())
    made = items()
    for queue, router in zip(put_into(model, now), routers_in(unwrap(model)).values(), strict=True):
        routes = [item["routes"][0, :, router.layer_number - 1].long() for item in made]
        queue.top_indices_list += [one for one in routes for _ in range(2)]

    def step(data_iterator, of_model):
        set_stage("replay_forward")
        batch = next(data_iterator)
        with torch.no_grad():
            CONTRACT.step(iter([batch]), of_model)
        return CONTRACT.step(iter([batch]), of_model)

    set_stage("replay_backward")
    ours = PrefixSchedule(replace(CHUNKED, mode="auto"), looks_first=True)
    steps.call(ours, step, model, made)
    assert ours.report is not None and ours.report.decision.reason.endswith(TWO_CALLS.fix)


def test_a_queue_of_several_calls_a_step_is_stocks():
    run_ranks(1, reference_with_entries)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("one rank", "miles"), ("PP2, full recompute", "miles"), ("TP2, full recompute", "slime"),
     ("EP2", "slime")],
)  # fmt: skip
def test_a_step_is_that_of_the_stock_schedule(name, kind):
    layout, _ = CASES[name]
    for executed, raw in run_ranks(layout.world_size, compare, name, kind):
        assert executed < raw
