"""Data parallelism: steps with Megatron's DDP and optimizers, by both schedules and in turns.

Three steps each, since Megatron's DDP treats the first one differently. Ranks have different
numbers of rollouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.models.build import build_model, build_optimizer
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.numerics import assert_close, tolerance
from megatron_prefix.lab.plans.dealing import deal
from megatron_prefix.lab.rl import passes
from megatron_prefix.lab.runtime import Layout
from tests.harness.ranks import run_ranks
from tests.harness.reductions import Watch, Watched

pytestmark = pytest.mark.turns

VOCAB = 96
CONFIG = PrefixConfig(segment_tokens=64, min_gain=0, chunk_tokens=24)
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 5000}
SHARDED = {"use_distributed_optimizer": True}
PER_TOKEN = {"config_overrides": {"calculate_per_token_loss": True}}
BUILDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "distributed optimizer, overlap, mean over tokens": {**SHARDED, **OVERLAP, **PER_TOKEN},
}
STOCK, OURS, TURNS = "SSS", "PPP", "PSP"


class Steps(NamedTuple):
    """What a rank found.

    losses: per step, of this rank's rollouts. norms: of the whole gradient, before clipping.
    parameters: after the last step. watched: per step the reductions.
    """

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]
    watched: list[Watched]


def some_groups() -> list[Group]:
    """Unlike groups, so that ranks get different numbers of rollouts."""
    sizes = ((40, 24, 4), (16, 24, 2), (32, 12, 3))
    made = (
        generate(1, prompt, response, num, tree=tree, depth=2, vocab_size=VOCAB, name=f"g{i}")
        for i, (tree, (prompt, response, num)) in enumerate(
            zip(("branch", "flat", "flat"), sizes, strict=True)
        )
    )
    return [group for groups in made for group in groups]


def positions(groups: Sequence[Group]) -> int:
    return sum(len(rollout) - 1 for group in groups for rollout in group.rollouts)


def take_steps(
    turns: str,
    groups: Sequence[Group],
    layout: Layout,
    build: dict[str, Any],
    clip_grad: float = 0.0,
    dtype: str = "float32",
) -> Steps:
    """One rank's part of a step for each of `turns`: S for Megatron's schedule, P for ours."""
    runtime.initialize(layout)
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_prefix.lab.rl import loss
    from megatron_prefix.lab.verify import align
    from megatron_prefix.run.schedule import PrefixSchedule

    spec = resolve("tiny-qwen3", num_layers=2).with_vocab(VOCAB)
    ranks = deal(groups, spec, layout, CONFIG, stock=True)
    mine = ranks[parallel_state.get_data_parallel_rank()]
    (chunk,) = build_model(spec, layout=layout, dtype=dtype, **build)
    # A large eps, so that the update does not magnify the rounding of small gradients.
    optimizer = build_optimizer([chunk], lr=1e-3, eps=1e-3, clip_grad=clip_grad)
    schedules = {"S": get_forward_backward_func(), "P": PrefixSchedule(CONFIG)}
    step = loss.forward_step(loss.GrpoConfig(clip_low=1.0, clip_high=1e9))
    watch = Watch([chunk])
    losses, norms = [], []
    for number, turn in enumerate(turns):
        items = align.microbatches(mine, seed=number + 7 * layout.dp * len(mine))
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        watch.begin()
        logs = passes.run(schedules[turn], step, [chunk], items)
        losses.append(float(sum(log["loss"][0] for log in logs)))
        success, norm, _ = optimizer.step()
        assert success
        norms.append(float(norm) if norm is not None else 0.0)
    parameters = {name: p.detach().clone() for name, p in chunk.module.named_parameters()}
    return Steps(losses, norms, parameters, watch.steps)


def assert_same(found: Steps, wanted: Steps, num_tokens: int, dtype: torch.dtype) -> None:
    limit = tolerance(dtype, num_tokens)
    assert found.losses == pytest.approx(wanted.losses, rel=limit, abs=limit * num_tokens)
    assert found.norms == pytest.approx(wanted.norms, rel=limit)
    for name, value in wanted.parameters.items():
        assert_close(found.parameters[name], value, num_tokens, what=name)


def on_ranks(turns: str, groups: Sequence[Group], layout: Layout, **options: Any) -> list[Steps]:
    return run_ranks(layout.dp, lambda: take_steps(turns, groups, layout, **options))


@pytest.mark.parametrize("name", BUILDS)
def test_both_schedules_take_the_same_steps(name: str) -> None:
    groups, build = some_groups(), BUILDS[name]
    # In turns matters where the steps of one schedule leave something for the next.
    ours = (OURS, TURNS) if "overlap" in name else (OURS,)
    stock, *others = (
        on_ranks(turns, groups, Layout(dp=2), build=build, clip_grad=0.3)
        for turns in (STOCK, *ours)
    )
    for wanted, *found in zip(stock, *others, strict=True):
        assert all(norm > 0.4 for norm in wanted.norms), "nothing was clipped"
        for steps in found:
            assert_same(steps, wanted, positions(groups), torch.float32)
        num = wanted.watched[0].num
        assert num > 1 or "overlap" not in name
        for steps in (wanted, *found):
            for step in steps.watched:
                assert step.reduced_once() and not step.late
        early = [step.early > 0 for step in found[0].watched]
        assert early == ([False, True, True] if "overlap" in name else [False] * 3)


@pytest.mark.parametrize("build", [{}, {**SHARDED, **OVERLAP}], ids=["plain", "all"])
def test_a_rank_without_rollouts_meets_the_others(build: dict[str, Any]) -> None:
    """Copies of one rollout stay on one of three ranks."""
    groups = list(generate(1, 40, 8, 2, num_copies=1, vocab_size=VOCAB))
    layout, spec = Layout(dp=3), resolve("tiny-qwen3").with_vocab(VOCAB)
    placed = deal(groups, spec, layout, CONFIG, stock=True)
    assert [group.name for rank in placed for group in rank] == ["synthetic-0000", "idle", "idle"]
    stock, ours = (on_ranks(turns, groups, layout, build=build) for turns in (STOCK, OURS))
    for wanted, found in zip(stock, ours, strict=True):
        assert_same(found, wanted, positions(groups), torch.float32)
        assert found.norms[0] > 0
    assert [found.losses[0] != 0 for found in ours] == [True, False, False]
    for one, other in itertools.pairwise(ours):
        for name, value in one.parameters.items():
            assert torch.equal(value, other.parameters[name]), name
