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
from megatron_prefix.run import schedule
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import steps
from tests.harness.one_rank import small_model
from tests.harness.ranks import run_ranks
from tests.harness.steps import Contract, Microbatch

pytestmark = pytest.mark.turns

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
        (True, False, "P", True, True),
        (True, True, "SPPSPS", False, True),
        (False, True, "PSPS", True, False),
    ],
    ids=[
        "distributed optimizer",
        "distributed optimizer, overlapped, mixed",
        "overlapped, mixed, no no_sync_func",
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


def exchanging(where: str, options: dict[str, Any], ep: int) -> tuple[float, bool, str]:
    """A trainer that takes the mean over data-parallel ranks, in the "loss" or "before" the model
    call: how far its gradients are from stock's, relative to the largest, and its last decision."""
    layout = Layout(dp=2, ep=ep)
    world = runtime.initialize(layout)

    class Exchanging(Contract):
        def step(self, data_iterator: Any, model: Any) -> Any:
            if where == "before":
                torch.distributed.all_reduce(torch.ones(()))
            return super().step(data_iterator, model)

        def loss_func(self, batch: Microbatch) -> Any:
            loss = super().loss_func(batch)

            def scaled(output: Tensor) -> Any:  # by what every rank has at this place in its step
                scale = torch.full((), float(batch["uid"] + 1 + world.rank))
                if where == "loss":
                    torch.distributed.all_reduce(scale)
                return loss(output * scale)

            return scaled

    found = []
    config = replace(CONFIG, min_speedup=0.01, **options)
    ours = PrefixSchedule(config, looks_first=True)
    for one in (ours, get_forward_backward_func()):
        preset = "tiny-moe" if ep > 1 else "tiny-llama"
        model = small_model(preset, dtype=torch.float64, layout=layout)
        for number in range(2):
            steps.zero_gradients(model)
            steps.call(one, Exchanging().step, model, items(number + world.rank, num=3))
        found.append(steps.gradients(model))
    runtime.shutdown()
    assert ours.report is not None
    most = max(float(one.abs().max()) for one in found[1].values())
    apart = max(float((one - found[1][name]).abs().max()) for name, one in found[0].items())
    return apart / most, ours.report.decision.share, ours.report.decision.reason


@pytest.mark.parametrize("across", ["off", "auto"])
def test_losses_that_exchange_are_called_in_stocks_order(across: str) -> None:
    options = {"mode": "auto", "across_ranks": across}
    for apart, share, reason in run_ranks(2, exchanging, "loss", options, 1):
        assert share, reason
        assert apart < 1e-13


@pytest.mark.parametrize(("where", "ep"), [("before", 1), ("loss", 2)])
def test_stock_runs_where_ranks_would_wait_for_one_another(where: str, ep: int) -> None:
    for apart, share, reason in run_ranks(2, exchanging, where, {"mode": "auto"}, ep):
        assert not apart and not share and reason.endswith(table.DATA_EXCHANGE.fix)


@pytest.mark.parametrize("across", ["off", "on"])
def test_in_mode_on_losses_that_exchange_are_named(across: str) -> None:
    with pytest.raises(UserError, match="exchange with other data-parallel ranks"):
        run_ranks(2, exchanging, "loss", {"mode": "on", "across_ranks": across}, 1)


def out_of_order() -> tuple[float, bool, str]:
    schedule.are_in_order = lambda *_: False  # type: ignore[assignment]
    return exchanging("loss", {"mode": "auto"}, 1)


def test_losses_that_exchange_in_another_order_are_stocks() -> None:
    for apart, share, reason in run_ranks(2, out_of_order):
        assert not apart and not share and "in another order" in reason
