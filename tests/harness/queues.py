"""Routers that take their routes from a queue inside Megatron's top-k, as in slime and in miles:
stand-ins of theirs."""

import contextlib
import os
import sys
import types
from types import SimpleNamespace

import pytest
from megatron.core.transformer.moe import router as megatron_router

from tests.harness.quantised import quantised as built_with

INDICES = {"replay_forward": "forward_index", "replay_backward": "backward_index"}


class Entries:
    """A queue as slime and miles have it; `current` is that of the router that runs, and
    `set_stages` sets the stage of all of them."""

    current = set_stages = None

    def __init__(self, *entries):
        self.top_indices_list, self.forward_index, self.backward_index = [*entries], 0, 0

    def pop(self, name):
        place = getattr(self, name)
        setattr(self, name, place + 1)
        return self.top_indices_list[place]


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


def set_stage(stage):
    """Of all queues, where there are any."""
    if Entries.set_stages:
        Entries.set_stages(stage)


def routers(model):
    """Those of a model's decoder that have a queue."""
    return [one for one in model.decoder.modules() if hasattr(one, "routing_replay")]


def put_into(model):
    for router in model.decoder.modules():
        if isinstance(router, megatron_router.TopKRouter):
            router.routing_replay = queue = Entries()
            router.register_forward_pre_hook(
                lambda *_, queue=queue: setattr(Entries, "current", queue)
            )


@contextlib.contextmanager
def queued(kind):
    """Models that are built meanwhile have queues, whose stage is that of slime or of miles."""
    stock = megatron_router.topk_routing_with_score_function
    with pytest.MonkeyPatch.context() as patch, built_with(put_into):
        stage, set_stages = stages(kind, patch)

        def topk(scores, num, groups, group_topk, choose):
            routes = Entries.current.pop(INDICES[stage()])
            assert routes.shape == (len(scores), num)
            return scores.gather(1, routes), routes

        def routed(*args, **options):
            queue = SimpleNamespace(get_replay_topk=topk)
            return stock(*args, **options | {"router_replay": queue})

        patch.setattr(megatron_router, "topk_routing_with_score_function", routed)
        patch.setattr(Entries, "set_stages", staticmethod(set_stages))
        yield
