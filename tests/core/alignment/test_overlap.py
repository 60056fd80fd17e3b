"""Reductions that begin during the last backwards: exact, each once, early, in one order."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.errors import StepOutOfMemory
from megatron_prefix.features.overlap import reductions as overlap
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.build import build_model, build_optimizer, unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.models.weights import global_parameters
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.lab.plans.dealing import deal
from megatron_prefix.lab.rl import loss, passes
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from tests.harness.ranks import run_ranks
from tests.harness.reductions import Watch, Watched

VOCAB = 96
CONFIG = PrefixConfig(segment_tokens=64, min_gain=0, chunk_tokens=24)
BUCKETS = {"bucket_size": 5000}
NO_AUX = {"moe_aux_loss_coeff": 0.0}


class Found(NamedTuple):
    """What a rank found: weights after the last step, and the reductions of each step."""

    parameters: dict[str, Tensor]
    watched: list[Watched]


class Job(NamedTuple):
    """Steps on ranks of a preset's model."""

    name: str = "tiny-qwen3"
    layout: Layout = Layout(dp=2)
    model: Mapping[str, Any] = MappingProxyType({})  # fields of the preset
    build: Mapping[str, Any] = MappingProxyType({})  # options of the built model
    around: Callable[..., contextlib.AbstractContextManager] = lambda *_: contextlib.nullcontext()
    """(step, rank, chunks) -> context of a step."""

    def on_ranks(self, turns, overlaps, data):
        """Steps by the stock schedule (S) and ours (P); `data` gives a rank's groups by step."""
        return self.runs(data, (turns, overlaps))[0]

    def runs(self, data, *runs):
        """Several runs of the same ranks, each as `on_ranks`."""

        ranks = run_ranks(self.layout.world_size, lambda: self.runs_here(runs, data))
        return [[*found] for found in zip(*ranks, strict=True)]

    def runs_here(self, runs, data):
        """One rank's part of several runs."""
        runtime.initialize(self.layout)
        return [self.take(turns, overlaps, data) for turns, overlaps in runs]

    def take(self, turns, overlaps, data):
        """One rank's part of a run."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        options = {"num_layers": max(2, self.layout.pp * self.layout.vpp), **self.model}
        spec = resolve(self.name, **options).with_vocab(VOCAB)
        build = {"dtype": "float64", **self.build, "overlap_grad_reduce": overlaps, **BUCKETS}
        chunks = build_model(spec, layout=self.layout, **build)
        # A large eps, so that the update does not magnify the rounding of small gradients.
        optimizer = build_optimizer(chunks, lr=1e-3, eps=1e-3, clip_grad=0.0)
        schedules = {"S": get_forward_backward_func(), "P": PrefixSchedule(CONFIG)}
        step = loss.forward_step(loss.GrpoConfig(clip_low=1.0, clip_high=1e9))
        watch, rank = Watch(chunks), parallel_state.get_data_parallel_rank()
        for number, turn in enumerate(turns):
            mine = data(number, rank, spec, self.layout)
            items = align.microbatches(mine, 10 * number + rank, self.layout.alignment)
            if self.layout.cp > 1:
                items = align.on_this_cp_rank(items)
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            watch.begin()
            with self.around(number, rank, chunks):
                passes.run(schedules[turn], step, chunks, items)
            assert optimizer.step()[0]
        values = {
            f"{number} {name}": parameter.detach().clone()
            for number, chunk in enumerate(chunks)
            for name, parameter in global_parameters(unwrap(chunk))
        }
        return Found(values, watch.steps)


def flat(number, rank, spec, layout):
    """Groups whose last backward is that of a prompt, in chunks: without loss."""
    return [*generate(2, 40, 16, 2, vocab_size=VOCAB, seed=10 * number + rank)]


def trees(number, rank, spec, layout):
    """Groups placed on the ranks, unlike in size where the layout allows."""
    made = [
        *generate(2, 40, 24, 3, tree="branch", depth=2, vocab_size=VOCAB, seed=number, name="a"),
        *generate(1, 32, 12, 2, vocab_size=VOCAB, seed=number + 1, name="b"),
    ]
    return deal(made, spec, layout, CONFIG, stock=True)[rank]


def alone(number, rank, spec, layout):
    """As `flat`, but one rank has a rollout that shares nothing in every other step: its last
    backward has loss."""
    if rank == number % 2:
        return [*generate(1, 8, 16, 1, vocab_size=VOCAB, seed=number)]
    return flat(number, rank, spec, layout)


SHARDED = {"dtype": "float32", "use_distributed_optimizer": True}
PER_TOKEN = {"config_overrides": {"calculate_per_token_loss": True}}
JOBS: dict[str, tuple[Job, Callable[..., Any]]] = {
    "DP2, an output layer, full recompute": (
        Job(model={"tie_embeddings": False}, build={"recompute": "full"}), flat,
    ),
    "DP2, distributed optimizer": (Job(build=SHARDED), trees),
    "CP2": (Job(layout=Layout(cp=2), build=PER_TOKEN), flat),
    "TP2 SP DP2": (Job(layout=Layout(tp=2, dp=2, sequence_parallel=True)), flat),
    "PP2 VPP2 DP2": (Job(layout=Layout(pp=2, vpp=2, dp=2)), trees),
    "EP2 of DP4": (Job("tiny-moe", Layout(dp=4, ep=2), NO_AUX), flat),
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_overlapped_steps_are_exact_and_early(name):
    job, data = JOBS[name]
    expected, found = job.runs(data, ("SSSS", False), ("PPSP", True))
    dtype = torch.float32 if "distributed" in name else torch.float64
    for ours, stock in zip(found, expected, strict=True):
        for parameter, value in stock.parameters.items():
            assert_close(ours.parameters[parameter], value, 3000, dtype, what=parameter)
        for number, step in enumerate(ours.watched):
            assert step.reduced_once() and not step.late
            if number == 0:
                assert step.inside == step.early == 0
            elif number != 2:
                assert step.inside == step.num - step.outside, "some reductions waited for the end"
    first_stages = found[: len(found) // job.layout.pp]
    for ours in first_stages:
        assert ours.watched[0].num > 3, "one bucket"
        step = ours.watched[3]
        assert step.early >= step.num - 1, "only the embedding's bucket is last"
        if job.layout.vpp > 1:
            assert step.order[0] == step.num - 1, "the last chunk is the first to end"
    assert_one_order(found, job.layout)


def assert_equal(found, wanted):
    """Weights are the same bit for bit, and no gradient came too late."""
    for one, other in zip(found, wanted, strict=True):
        assert not any(step.late for step in one.watched)
        for name, value in other.parameters.items():
            assert torch.equal(one.parameters[name], value), name


def assert_one_order(found, layout):
    """Ranks of one pipeline stage reduce in one order in all of our steps."""
    ranks = len(found) // layout.pp
    for stage in range(layout.pp):
        alike = found[stage * ranks : (stage + 1) * ranks]
        orders = {
            tuple(step.order)
            for one in alike
            for number, step in enumerate(one.watched)
            if number != 2
        }
        assert len(orders) == 1, orders


def test_unlike_last_backwards_reduce_in_one_order():
    """One rank's last backward has loss, the other's is that of a prompt."""
    found = Job().on_ranks("PPPP", True, alone)
    assert_one_order(found, Layout(dp=2))
    for rank, one in enumerate(found):
        assert [step.early > 0 for step in one.watched] == [False, *[True] * 3], rank


@contextlib.contextmanager
def unfinished(_, __, chunks):
    """The trainer calls finalize itself."""
    config = unwrap(chunks[0]).config
    finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, None
    yield
    finalize(chunks, None)
    config.finalize_model_grads_func = finalize


@contextlib.contextmanager
def aligned(_, __, chunks):
    """Stages are to reduce at the same time (Megatron's align_grad_reduce)."""
    unwrap(chunks[0]).config.grad_sync_func = chunks[0].start_grad_sync
    yield


PIPELINE = Job(layout=Layout(pp=2, dp=2))


@functools.cache
def with_nothing_around():
    """What both are compared with."""
    return PIPELINE.on_ranks("PPP", True, flat)


@pytest.mark.parametrize("around", [unfinished, aligned])
def test_what_may_not_begin_early_waits(around):
    later = PIPELINE._replace(around=around).on_ranks("PPP", True, flat)
    assert_equal(later, with_nothing_around())
    for rank, found in enumerate(later):
        early = around is aligned and rank < 2
        assert [step.inside > 0 for step in found.watched] == [False, early, early]
        assert all(step.reduced_once() for step in found.watched)


@pytest.mark.parametrize("layer", [0, -1], ids=["the first layer", "the last layer"])
def test_weights_may_get_no_gradient_at_first(layer):
    """Frozen in the first two steps; a segment without loss may leave out the last layer."""

    @contextlib.contextmanager
    def around(number, _, chunks):
        some = unwrap(chunks[0]).decoder.layers[layer]
        (some.self_attention.linear_qkv if layer else some.mlp.linear_fc2).requires_grad_(
            number > 1
        )
        yield

    found, plain = Job(around=around).runs(flat, ("PPPP", True), ("PPPP", False))
    assert_equal(found, plain)
    for one in found:
        waited = [step.num - step.inside for step in one.watched]
        if not layer:
            assert waited == [one.watched[0].num, *[one.watched[0].outside] * 3]


@contextlib.contextmanager
def hurrying(number, rank, chunks):
    """In the third step rank 0 believes that all layers are complete with the last one."""
    if number != 2 or rank:
        yield
        return
    assert {place for _, place in overlap.orders[chunks[0]]} == {-1, 0, 1}
    orders = {chunks[0]: tuple((n, 1) for n, _ in overlap.orders[chunks[0]])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "orders", orders)
        with pytest.raises(RuntimeError, match=r"layers\.0.*turn overlap_grad_reduce off"):
            yield
    groups = chunks[0].bucket_groups
    assert all(group.grad_reduce_handle is None for group in groups), "somebody waits"


def test_a_gradient_that_comes_too_late_ends_the_step():
    """On its rank; no other one waits for it."""
    found = Job(around=hurrying).on_ranks("PPP", True, flat)
    assert found[0].watched[2].late and not found[1].watched[2].late


@contextlib.contextmanager
def using_twice(_, rank, chunks):
    """On rank 0 a weight of the second layer is used in front of the first one, too."""
    model = unwrap(chunks[0])
    weight = model.decoder.layers[1].mlp.linear_fc1.weight

    def more(_, __, output):
        return output + weight.sum() * 1e-3

    handle = model.embedding.register_forward_hook(more) if rank == 0 else None
    yield
    if handle is not None:
        handle.remove()


def test_weights_that_are_used_outside_of_their_layer_wait():
    """On all ranks, as all reduce in one order."""
    found, plain = Job(around=using_twice).runs(flat, ("PPP", True), ("PPP", False))
    assert_equal(found, plain)
    assert all([step.inside for step in one.watched] == [0, 0, 0] for one in found)


class Broken(RuntimeError):
    """A fault."""


@contextlib.contextmanager
def failing(chunk, error):
    """The backward of the model's first layer fails in the step's last backward."""
    weight = unwrap(chunk).decoder.layers[0].self_attention.linear_qkv.weight
    watching = overlap.Reductions.watching

    @contextlib.contextmanager
    def failing_watching(self, *args):
        def fail(_):
            raise error

        handle = weight.register_hook(fail)
        with contextlib.ExitStack() as stack:
            stack.callback(handle.remove)
            stack.enter_context(watching(self, *args))
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap.Reductions, "watching", failing_watching)
        yield


@contextlib.contextmanager
def breaking(number, _, chunks):
    """The second step fails after reductions have begun, and the third says so."""
    if number == 0:
        yield
        return
    if number == 1:
        arrived, stock = [], overlap.Reductions._arrived

        def counted(*args):
            arrived.append(args)
            stock(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(overlap.Reductions, "_arrived", counted)
            with pytest.raises(Broken), failing(chunks[0], Broken()):
                yield
        num = len(arrived)
        total = sum(parameter.sum() for parameter in chunks[0].parameters())
        with chunks[0].no_sync():
            total.backward()
        assert 0 < num == len(arrived), "hooks are left"
        return
    with pytest.raises(RuntimeError, match="begin again from a checkpoint"):
        yield
    for group in chunks[0].bucket_groups:
        group.grad_reduce_handle = None  # for the optimizer's sake


def test_after_a_failed_reduction_no_step_runs():
    Job(around=breaking).on_ranks("PPP", True, flat)


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried")


@contextlib.contextmanager
def exhausting(number, _, chunks):
    """Memory runs out in the last backward of the second step."""
    if number == 0:
        yield
        return
    failure = pytest.raises(StepOutOfMemory, match="being reduced: turn overlap_grad_reduce off")
    with failure, failing(chunks[0], OUT_OF_MEMORY):
        yield


def test_no_step_is_made_again_after_reductions_have_begun():
    Job(around=exhausting).on_ranks("PP", True, flat)
