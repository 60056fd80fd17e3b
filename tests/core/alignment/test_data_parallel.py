"""Data-parallel ranks: DDP's reductions around the prefix schedule, mixed with Megatron's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_prefix.config import PrefixConfig
from megatron_prefix.errors import UserError
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_optimizer, unwrap
from megatron_prefix.lab.numerics import assert_close
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.refusals import table
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import steps
from tests.harness.one_rank import small_model
from tests.harness.ranks import run_ranks
from tests.harness.steps import Contract, Microbatch

CONFIG = PrefixConfig(min_gain=0, kernel="math")


def items(seed: int, num: int) -> list[Microbatch]:
    """One group of rollouts with a common prompt."""
    return steps.group(seed, num)


def train(
    distributed: bool, overlap: bool, kinds: str, per_token: bool, no_sync_func: bool
) -> tuple[list[Any], dict[str, Tensor]]:
    """Steps of stock (S) and prefix (P) schedules on one of two ranks; gradients and weights."""
    world = runtime.initialize(Layout(dp=2))
    model = small_model(
        dtype=torch.float32,
        layout=Layout(dp=2),
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=overlap,
        bucket_size=20_000,
        config_overrides=dict(calculate_per_token_loss=per_token),
    )
    assert not overlap or len(model.bucket_groups) > 2
    optimizer = build_optimizer([model], lr=1e-2, eps=1e-3, clip_grad=0.0)
    if overlap and not no_sync_func:
        unwrap(model).config.no_sync_func = None
    schedules = {"S": get_forward_backward_func(), "P": PrefixSchedule(CONFIG)}
    found = []
    for number, kind in enumerate(kinds):
        # Ranks hold different rollouts, and not equally many. Without no_sync_func Megatron counts
        # a reduction as ready by the number of microbatches, which must then stay the same.
        more = (world.rank + number) % 2 if no_sync_func else 0
        data = items(10 * number + world.rank, num=3 + more)
        optimizer.zero_grad()
        steps.zero_gradients(model)
        steps.call(schedules[kind], Contract().step, model, data)
        shards = [
            bucket.grad_data.chunk(2)[world.rank].clone()
            if distributed
            else bucket.grad_data.clone()
            for group in model.bucket_groups
            for bucket in group.buckets
        ]
        found.append(shards)
        success, _, _ = optimizer.step()
        assert success
    return found, {n: p.detach().clone() for n, p in unwrap(model).named_parameters()}


@pytest.mark.parametrize(
    ("distributed", "overlap", "kinds", "per_token", "no_sync_func"),
    [
        (False, False, "P", False, True),
        (False, True, "PP", False, True),
        (True, False, "P", True, True),
        (True, True, "SPPSPS", False, True),
        (False, True, "PSPS", True, False),
        (True, True, "PPSP", True, True),
    ],
    ids=[
        "all-reduce",
        "all-reduce, overlapped",
        "distributed optimizer",
        "distributed optimizer, overlapped, mixed",
        "overlapped, mixed, no no_sync_func",
        "distributed optimizer, overlapped, prefix first",
    ],
)
def test_two_data_parallel_ranks(
    distributed: bool, overlap: bool, kinds: str, per_token: bool, no_sync_func: bool
) -> None:
    """Reduced gradients and weights after every step are those of Megatron's schedule."""
    options = (distributed, overlap, kinds, per_token, no_sync_func)
    found = run_ranks(2, train, *options)
    expected = run_ranks(2, train, distributed, overlap, "S" * len(kinds), per_token, no_sync_func)
    for (gradients, weights), (wanted, goal) in zip(found, expected, strict=True):
        for shards, others in zip(gradients, wanted, strict=True):
            assert len(shards) == len(others)
            for shard, other in zip(shards, others, strict=True):
                assert other.abs().max() > 0
                # Differences of earlier steps come back through the weights, hence the steps.
                assert_close(shard, other, 1000 * len(kinds))
        for name, weight in goal.items():
            assert_close(weights[name], weight, 1000 * len(kinds), what=name)
    if not distributed:
        first, second = (rank[0] for rank in found)
        pairs = zip(first, second, strict=True)
        assert all(torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))


def evaluate(mode: str) -> tuple[int, bool]:
    """Calls without gradients, more on one rank than on the other, and then a step with them."""
    world = runtime.initialize(Layout(dp=2))
    model = small_model(dtype=torch.float32, layout=Layout(dp=2))
    schedule = PrefixSchedule(replace(CONFIG, mode=mode, min_speedup=0.01), looks_first=True)
    logs = 0
    for number in range(1 + 2 * world.rank):
        data = items(number + 5 * world.rank, num=3)
        with torch.no_grad():
            logs += len(steps.call(schedule, Contract().step, model, data, forward_only=True))
    for number in range(2):
        steps.zero_gradients(model)
        steps.call(schedule, Contract().step, model, items(number + world.rank, num=3))
    runtime.shutdown()
    assert schedule.report is not None
    return logs, schedule.report.decision.share


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_ranks_need_not_evaluate_equally_often(mode: str) -> None:
    assert run_ranks(2, evaluate, mode) == [(3, True), (9, True)]


def exchange_in_losses(mode: str) -> tuple[bool, bool, str]:
    """A trainer whose losses take the mean over data-parallel ranks."""
    world = runtime.initialize(Layout(dp=2))

    class Exchanging(Contract):
        def loss_func(self, batch: Microbatch) -> Any:
            loss = super().loss_func(batch)

            def exchanging(output: Tensor) -> Any:
                scale = torch.ones(()) * (1 + world.rank)
                torch.distributed.all_reduce(scale)
                return loss(output * scale)

            return exchanging

    found = []
    schedule = PrefixSchedule(replace(CONFIG, mode=mode), looks_first=True)
    for one in (schedule, get_forward_backward_func()):
        model = small_model(dtype=torch.float32, layout=Layout(dp=2))
        for number in range(2):
            steps.zero_gradients(model)
            steps.call(one, Exchanging().step, model, items(number + world.rank, num=3))
        found.append(steps.gradients(model))
    runtime.shutdown()
    assert schedule.report is not None
    same = all(torch.equal(one, found[1][name]) for name, one in found[0].items())
    return same, schedule.report.decision.share, schedule.report.decision.reason


def test_losses_that_exchange_over_ranks_keep_stocks_order() -> None:
    for same, share, reason in run_ranks(2, exchange_in_losses, "auto"):
        assert same and not share and reason.endswith(table.DATA_EXCHANGE.fix)
    with pytest.raises(UserError, match="exchange with other data-parallel ranks"):
        run_ranks(2, exchange_in_losses, "on")
