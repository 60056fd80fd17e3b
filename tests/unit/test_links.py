"""Messages of whole plans between real ranks, host-moved and gated, without a model."""

from __future__ import annotations

import concurrent.futures
import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_prefix import runtime
from megatron_prefix.pipeline.channels import Channels, channels_of
from megatron_prefix.pipeline.gated import GatedLinks
from megatron_prefix.pipeline.p2p import Links
from megatron_prefix.pipeline.planner import make_plan
from megatron_prefix.tree import Forest
from tests.harness.ranks import run_ranks
from tests.harness.trees import random_forest

CPU = torch.device("cpu")
POOL = concurrent.futures.ThreadPoolExecutor(8)


class HostGatedLinks(GatedLinks):
    """The gate over gloo: its works do not say when they are done, so threads wait for them."""

    def _waiter(self, work):
        if not hasattr(self, "_waiters"):
            self._waiters = {}
        if id(work) not in self._waiters:  # the work is kept: its id stays its own
            self._waiters[id(work)] = POOL.submit(work.wait), work
        return self._waiters[id(work)][0]

    def _landed(self, work):
        return self._waiter(work).done()

    def _wait(self, work, doing):
        self._waiter(work).result()  # a second wait of one work would never end on gloo

    def _mark(self):
        return SimpleNamespace(query=lambda: True)


def forest() -> Forest:
    """Three levels, uneven, the same on every rank."""
    return random_forest(random.Random(5))


def dist_size() -> int:
    """How many ranks the harness has started."""
    return runtime.env_world_size() or 1


def content(kind: str, segment: int, stage: int) -> float:
    """What the message of a segment that leaves a stage is filled with."""
    return 1000.0 * stage + segment + (0.5 if kind == "B" else 0.0)


def run_plan(num_chunks: int, gated: bool, backward: bool) -> int:
    """Follows this rank's program with messages only; returns how many arrived, all right."""
    world = runtime.initialize(runtime.Layout(pp=dist_size()))
    rank, size = world.rank, world.world_size
    plan = make_plan(forest(), size, num_chunks=num_chunks)
    found = channels_of(parallel_state.get_pipeline_model_parallel_group(), CPU)
    if gated:
        control = dist.new_group(list(range(size)))
        found = Channels(found.ranks, found.rank, found.groups, found.timeout, control)
    kind_of_links = HostGatedLinks if gated else Links
    links = kind_of_links(found, plan, lambda index: (3, index + 1), torch.float64, CPU, backward)
    arrived, last = 0, plan.num_stages - 1
    for action in plan.programs[rank]:
        if action.kind == "B" and not backward:
            continue
        stage = plan.stage(rank, action.chunk)
        before, after = (0, last) if action.kind == "F" else (last, 0)
        if stage != before:
            source = stage + (-1 if action.kind == "F" else 1)
            message = links.receive(action)
            wanted = content(action.kind, action.segment, source)
            if message.shape != (3, action.segment + 1) or not bool((message == wanted).all()):
                raise AssertionError(f"{action} on stage {stage} got {message}, wanted {wanted}")
            arrived += 1
        if stage != after:
            value = content(action.kind, action.segment, stage)
            links.send(action, torch.full((3, action.segment + 1), value, dtype=torch.float64))
        links.pace()
    links.finish()
    dist.barrier()
    return arrived


@pytest.mark.parametrize("gated", [False, True], ids=["host", "gated"])
@pytest.mark.parametrize(
    ("num_ranks", "num_chunks", "backward"),
    [(2, 1, True), (2, 2, True), (3, 1, True), (3, 2, True), (4, 1, True), (2, 2, False)],
)
def test_every_message_of_a_plan_arrives_where_it_belongs(num_ranks, num_chunks, backward, gated):
    arrived = run_ranks(num_ranks, run_plan, num_chunks, gated, backward)
    num_segments = len(forest().segments)
    links = num_ranks * num_chunks - 1
    assert sum(arrived) == links * num_segments * (2 if backward else 1)
