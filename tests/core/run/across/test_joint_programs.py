"""What ranks issue in a step, in which order: what lab/plans/joint_program.py writes, and the
executor does."""

import contextlib
import functools
import itertools
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.across.exchanges import Exchanges
from megatron_prefix.features.across.part import Crossing
from megatron_prefix.features.experts.part import Routers
from megatron_prefix.features.experts.sums import sums_of
from megatron_prefix.features.overlap.part import Overlap
from megatron_prefix.features.overlap.reductions import Group, Reductions
from megatron_prefix.lab.plans.joint_program import LAYERS, Batch
from megatron_prefix.plan.actions import Action
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.execute import messages
from megatron_prefix.run.execute.executor import Executor
from megatron_prefix.run.execute.messages import Channels, Links
from megatron_prefix.tree.payload_map import Form, payload_map
from tests.harness.joint_jobs import Sizes, random_joint_job

CPU = torch.device("cpu")
SIZES = (
    Sizes(2), Sizes(3, 2), Sizes(2, 3), Sizes(2, 2, 2), Sizes(4, 2, 1, 2), Sizes(2, 2, 2, 2),
    Sizes(3, 2, counts=True), Sizes(4, 2, 1, 2, counts=True),
)  # fmt: skip
ALONE = (
    Sizes(2, 1, 1, 2, crosses=False), Sizes(4, 2, 2, 2, crosses=False), Sizes(3, 3, crosses=False),
)  # fmt: skip
"""Where gradients are reduced during backwards."""
Told = tuple[Any, ...]


class Recording(Executor):
    """Computes nothing."""

    def _forward(self, action, stage):
        stage.act(action)

    def _backward(self, action, stage):
        stage.act(action)


def issued(pipeline, rank, sizes, early, monkeypatch):
    """What one rank issues: its actions, the ends of its messages, in batches, sums, and
    reductions."""
    plan, steps = pipeline.plan, list[Told]()

    def act(action):
        stage, last = plan.stage(rank.stage, action.chunk), plan.num_stages - 1
        before, after = (0, last) if action.kind == "F" else (last, 0)
        if stage != before:
            links.receive(action)
        steps.append((action,))
        if action.kind == "B" and overlap.is_last(action):
            passing = reductions.passing(action.chunk)
            for layer in reversed(range(LAYERS)) if passing is not None else ():
                passing(layer)
        if stage != after:
            links.send(action, torch.empty(shapes(pipeline)[action.segment]))

    stages = [stage_of(pipeline, rank, chunk, act) for chunk in range(plan.num_chunks)]
    inputs = SimpleNamespace(max_position=0)
    reductions = reductions_of(pipeline, steps, early=early)
    overlap = overlap_of(reductions, plan, rank.stage)
    routers = [routers_of(pipeline, rank, steps)] if sizes.counts else []
    executor = Recording(
        plan, stages, inputs, False, contextlib.ExitStack(),
        parts=[*routers, crossing_of(pipeline, rank, steps), overlap],
    )  # fmt: skip
    links = links_of(pipeline, rank, steps, routers, monkeypatch)
    executor.run(rank.stage, links)
    overlap.behind()
    return steps


def routers_of(pipeline, rank, steps):
    """The part that begins sums of counts, which are written down."""
    begun = 0

    def begin(number):
        nonlocal begun
        steps.extend(("sum", each) for each in range(begun, number))
        begun = max(begun, number)

    alone = SimpleNamespace(language_models=[])
    part = Routers(PrefixConfig(), alone, Callbacks())
    sums = [*sums_of(pipeline.union, pipeline.owners)]
    vars(part).update(sums=sums, _counts=SimpleNamespace(begin=begin))
    return part


@dataclass(eq=False)
class Buckets:
    """A group of weights, whose reduction is written down."""

    steps: list[Told]
    told: Told
    grad_reduce_handle = None
    is_first_batch = False

    def start_grad_sync(self, **_):
        """It starts."""
        self.steps.append(self.told)


def reductions_of(pipeline, steps, *, early):
    """Of groups of weights, and of experts' weights, layer by layer, and of what is outside."""
    queue = []
    chunks = [*reversed(range(pipeline.plan.num_chunks))]
    layers = [(chunk, layer) for chunk in chunks for layer in reversed(range(LAYERS))]
    for chunk, layer in (*layers, *((chunk, -1) for chunk in chunks)):
        for _ in range(1 + (bool(pipeline.experts) and layer >= 0)):
            buckets = Buckets(steps, ("gradients", (chunk, layer)))
            queue.append(Group(chunk, layer, buckets))
    overlapping = SimpleNamespace(
        ddp_config=SimpleNamespace(overlap_grad_reduce=True), grad_accs=[]
    )
    made = Reductions.__new__(Reductions)
    vars(made).update(
        _queue=queue, _num_due=0, _due=set(), _early=early, _watches=False,
        _force_all_reduce=False, _finalizes=True,
        _rank=SimpleNamespace(models=[overlapping] * len(chunks)),
    )  # fmt: skip
    return made


def overlap_of(reductions, plan, stage):
    """The part of a step that has them; layers have no input that it could mark."""
    config = SimpleNamespace(finalize_model_grads_func=print)
    rank = SimpleNamespace(stage=stage, config=config)
    overlap = Overlap(PrefixConfig(), rank, Callbacks())
    empty = SimpleNamespace(model=SimpleNamespace(decoder=SimpleNamespace(layers=[])))
    last = {one.chunk: one.segment for one in plan.programs[stage] if one.kind == "B"}
    vars(overlap).update(_reductions=reductions, _hooks=[empty] * plan.num_chunks, _last=last)
    return overlap


def shapes(pipeline):
    """Of messages between stages, by segment; the last number names it."""
    return [(one.padded_length, 0, index) for index, one in enumerate(pipeline.plan.segments)]


def links_of(pipeline, rank, steps, parts, monkeypatch):
    """Messages between stages, which are written down, and sums of parts between them."""

    def begin(kind, tensor, peer, group):
        steps.append(((kind, (rank.data, peer), group[0], tensor.shape[2]),))
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)

    for name, kind in (("isend", "S"), ("irecv", "R")):
        monkeypatch.setattr(messages.dist, name, functools.partial(begin, kind))
    groups = {key: key for key in itertools.product("FB", range(3))}
    channels = Channels(tuple(range(pipeline.plan.num_ranks)), rank.stage, groups)
    levels = tuple((one.segment, one.depth) for one in pipeline.forest.exchanges)
    shape = lambda action: shapes(pipeline)[action.segment]  # noqa: E731
    return Links(channels, pipeline.union, shape, torch.float32, CPU, True, parts, levels)


def crossing_of(pipeline, rank, steps):
    """The part of the step that makes exchanges."""
    made = Crossing.__new__(Crossing)
    attempt = SimpleNamespace(step=SimpleNamespace(forest=pipeline.forest))
    vars(made).update(_exchanges=exchanges_of(pipeline, rank, steps), _attempt=attempt)
    return made


def exchanges_of(pipeline, rank, steps):
    """What crosses data-parallel ranks, which is written down."""

    def begin(some):
        told = [
            ("SR"[one.way is dist.irecv], (one.peer, rank.stage), *one.tensors[0].shape[:2])
            for one in some
        ]
        if told:
            steps.append(tuple(told))

    communicator = SimpleNamespace(
        known=lambda chunk, *_: chunk, tell_rows=lambda *_: None, exchange=begin,
        rows=lambda _, chunk, __: [[row_of(chunk)]], rank=rank.data, ranks=[*range(9)],
    )  # fmt: skip
    if not pipeline.forest.exchanges:
        return None
    chunks = [carried(pipeline, chunk) for chunk in range(pipeline.plan.num_chunks)]
    return Exchanges(pipeline.forest, communicator, chunks, CPU)


def row_of(chunk):
    """Of a payload; it is empty and names the chunk."""
    return (chunk, 0), torch.float32


def carried(pipeline, chunk):
    """What crosses of a model chunk: a row a position, and of nothing else."""
    row, segments = row_of(chunk), pipeline.plan.segments

    def some(index, spans):
        rows = sum(segments[index].spans[span].padded for span in spans)
        return [(torch.empty(rows, *row[0]),)]

    return SimpleNamespace(
        model=chunk, forms=[Form.POSITIONS], parts=1, gathers=False, leaving=some,
        rows=lambda index: [[row]], arrived=lambda *_: None, add_to=lambda *_: None,
        sums=lambda index: [*some(index, range(len(segments[index].spans))), (), ()],
    )  # fmt: skip


def stage_of(pipeline, rank, chunk, act):
    plan = pipeline.plan
    seen = payload_map(plan.segments, plan.actions_of(rank.stage, chunk), 1, 1, [Form.POSITIONS])
    cache = SimpleNamespace(map=seen, clear=lambda: None, free=lambda *_, **__: None)
    hooks = SimpleNamespace(prepare=lambda _: None, end_step=lambda: None)
    return SimpleNamespace(
        hooks=hooks, cache=cache, final=None, losses=None, live={}, act=act,
    )  # fmt: skip


def told(pipeline, program):
    """The same of a written program."""
    found = list[Told]()
    for step in program:
        if isinstance(step, Action):
            found.append((step,))
        elif isinstance(step, Batch):
            found.append(tuple(end_told(pipeline, end) for end in step.ends))
        elif step.channel == "counts":
            found.append(("sum", step.what))
        elif step.channel == "gradients":
            found.append((step.channel, step.what))
    return found


def end_told(pipeline, end):
    if end.channel != "across":
        return end.kind, tuple(end.peer), end.channel, end.segment
    [spans] = (
        spans
        for one in pipeline.forest.exchanges
        for peer, spans in one.peers
        if (one.segment, peer) == (end.segment, end.peer.data)
    )
    segment = pipeline.plan.segments[end.segment]
    return end.kind, tuple(end.peer), sum(segment.spans[n].padded for n in spans), end.chunk


@pytest.mark.parametrize("sizes", [*SIZES, *ALONE], ids=str)
def test_the_executor_does_what_is_judged(sizes, monkeypatch):
    batches = 0
    for seed in range(12):
        job = random_joint_job(random.Random(seed), sizes)
        early = not any(one.forest.exchanges for one in job.pipelines)
        for rank, program in job.programs.items():
            pipeline = job.pipelines[rank.data]
            wanted = told(pipeline, program)
            assert issued(pipeline, rank, sizes, early, monkeypatch) == wanted
            batches += sum(len(one) > 1 for one in wanted)
    assert batches > 10 or not sizes.crosses
