"""Runs whose routers follow the same routes: recorded in every layout, followed by all passes; and
several steps by both schedules on real rollouts: parameters stay as near as rounding allows."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.rollouts import Group, read_groups
from megatron_prefix.lab.data.shorten import shorten
from megatron_prefix.lab.rl import routes
from megatron_prefix.lab.rl.baseline import Baseline
from megatron_prefix.lab.rl.dataset import RolloutSet
from megatron_prefix.lab.rl.job import ModelOptions, fit_vocabulary
from megatron_prefix.lab.rl.loss import GrpoConfig
from megatron_prefix.lab.rl.settings import TrainSettings
from megatron_prefix.lab.rl.trainer import Trainer
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import replay
from megatron_prefix.sidecar.cache import SidecarCache
from tests.harness import data
from tests.harness.data import BUNDLED
from tests.harness.ranks import run_ranks
from tests.harness.training import bundled

EXACT = ModelOptions("tiny-moe", dtype="float64", overrides=(("num_layers", 2),))
SETTINGS = TrainSettings(
    groups_per_step=2, num_minibatches=2, lr=1e-3, clip_grad=0.0, grpo=GrpoConfig(kl_coeff=0.1),
    baseline=Baseline("packed", 1024), prefix=PrefixConfig(mode="on", min_gain=8),
)  # fmt: skip


def groups():
    return [Group(group.name, group.rollouts[:4]) for group in bundled()[:2]]


def trainer(settings, world, options=EXACT):
    spec, fitted = fit_vocabulary(options, groups())
    return Trainer(settings, RolloutSet(tuple(fitted)), options, spec, world)


def recorded(layout):
    def on_rank():
        world = runtime.initialize(layout, "cpu", EXACT.seed)
        stock = replace(SETTINGS, prefix=PrefixConfig(mode="off"), routes="recorded")
        run = trainer(stock, world)
        run.step()
        return run.routes

    several = run_ranks(layout.world_size, on_rank)
    for other in several[1:]:
        assert_same(other, several[0])
    return several[0]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs) == 2
    for one, other in zip(ours, theirs, strict=True):
        for group in groups():
            for rollout in group.rollouts:
                key, num = (rollout.group, rollout.uid), len(rollout) - 1
                if key in other:
                    np.testing.assert_array_equal(one[key][:num], other[key][:num])
        assert one.keys() == other.keys()


@pytest.fixture(scope="module")
def on_one_rank():
    return recorded(Layout())


@pytest.mark.parametrize(
    "layout", [Layout(cp=2, pp=2), Layout(tp=2, sequence_parallel=True, dp=2, ep=2)], ids=str
)
def test_every_rank_has_the_routes_of_all(layout, on_one_rank):
    found = recorded(layout)
    assert_same(found, on_one_rank)
    assert all(len(one) == 4 for one in found)
    experts = np.concatenate([whole.reshape(-1) for one in found for whole in one.values()])
    assert len(np.unique(experts)) > 2


def test_both_schedules_follow_given_routes():
    """Routes drawn by position; the update differs from that by the routers' own."""
    layout = Layout(tp=2, sequence_parallel=True, cp=2)

    def on_rank():
        world = runtime.initialize(layout, "cpu", EXACT.seed)
        losses = []
        for which in ("own", "given"):
            run = trainer(replace(SETTINGS, routes=which, compare=True), world)
            run.routes = [drawn(run, 0), drawn(run, 1)]
            done = run.step()
            assert all(update.difference.passed for update in done.updates)
            assert all(update.executed_tokens < update.raw_tokens for update in done.updates)
            losses.append(done.metrics["train/weighted_logprob"])
        return losses

    for own, given in run_ranks(layout.world_size, on_rank):
        assert abs(own - given) > 1e-4


def drawn(run, number):
    """Routes by position, so that prompts have the same ones.

    In these draws every expert has tokens whose gradients do not cancel. In others one has only the
    first token of answers that agree, whose advantages add up to zero: then its gradient is
    rounding, and up to 1.07 of the limit from the other schedule's.
    """
    layers, topk = routes.shape_of(run.spec)
    found = {}
    for rollout in groups()[number].rollouts:
        draw = np.random.default_rng(4 + number)
        scores = draw.random((len(rollout), layers, run.spec.num_moe_experts))
        found[rollout.group, rollout.uid] = scores.argsort(-1)[..., :topk].astype(np.int16)
    return found


# AdamW's epsilon is above the rounding errors of gradients here. A tiny model in fp32 has one or
# two elements whose gradient is smaller than those, and with Megatron's 1e-8 the largest and the
# RMS difference of a run are of that one element, whose sign is chance in either schedule.
DRIFTING = TrainSettings(
    groups_per_step=2, num_minibatches=2, lr=1e-3, adam_eps=1e-5, baseline=Baseline("packed", 512),
    prefix=PrefixConfig(mode="on", min_gain=16),
)  # fmt: skip
SMALL = (("num_layers", 2),)


def real_groups():
    """A group of rag_musique and one of tau_airline in turn, six rollouts at most, cut short."""
    files = {"rag_musique": (0, 1, 2), "tau_airline": (2, 3, 2)}
    found = {name: data.groups(name, 4) for name in files}
    picked = [found[name][files[name][turn]] for turn in range(3) for name in files]
    cut = [shorten(Group(g.name, g.rollouts[:6]), 64)[0] for g in picked]
    return [group for group in cut if group is not None]


def run(layout, model, groups, steps, settings=DRIFTING):
    options = ModelOptions(model, overrides=SMALL)
    spec, fitted = fit_vocabulary(options, groups)

    def on_rank():
        world = runtime.initialize(layout, "cpu", options.seed)
        runs = replay.trainers(settings, tuple(fitted), options, spec, world)
        return replay.judged(replay.replayed(runs, steps))

    return run_ranks(layout.world_size, on_rank)[0]


def assert_within(result, steps):
    assert result.passed and not result.failures, result.failures
    assert len(result.steps) == steps and result.shared_steps > steps / 2
    for step in result.steps:
        assert 0 < step.drift.mean <= step.drift.rms <= step.drift.max < 1e-4
        assert 0 < step.floor.mean <= step.floor.rms <= step.floor.max < 1e-4
    first, last = result.steps[0], result.steps[-1]
    assert last.drift.rms > first.drift.rms, "runs that know nothing of one another drift apart"
    # Both learn: what they are rewarded for becomes likelier, in all three runs alike.
    assert all(last.weighted_logprob[name] > first.weighted_logprob[name] for name in replay.RUNS)


# Steps this short do not always pay; which of them do is measured, and not what is tested.
AUTO = replace(DRIFTING, prefix=PrefixConfig(mode="auto", min_gain=16, min_speedup=0.1))


def test_steps_of_a_pipeline_with_tensor_parallelism():
    assert_within(run(Layout(tp=2, pp=2), "tiny-llama", real_groups(), 4, AUTO), 4)


def test_a_schedule_that_loses_a_little_drifts(monkeypatch):
    """gK/gV of the suffixes with an error of 1e-4: rounding in 16 bit, a mistake in fp32."""
    add = SidecarCache.add

    def a_little_less(self, layer, index, what, gradients):
        add(self, layer, index, what, tuple(gradient * (1 - 1e-4) for gradient in gradients))

    groups = [kept for g in read_groups(BUNDLED) if (kept := shorten(g, 64)[0])][:2]
    right = run(Layout(), "tiny-llama", groups, 2)
    assert right.passed, right.failures
    monkeypatch.setattr(SidecarCache, "add", a_little_less)
    wrong = run(Layout(), "tiny-llama", groups, 2)
    assert not wrong.passed and "from step 1 on" in wrong.failures[0]
    assert all(ratio > 10 for ratio in wrong.ratio_max.values())
