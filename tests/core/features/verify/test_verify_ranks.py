"""`verify` on several ranks: what each has is compared, and all take the same way."""

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.features.across import step as across_step
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.run import schedule as schedules
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.step_run import StepRun
from tests.harness import steps
from tests.harness.one_rank import small_model
from tests.harness.ranks import run_ranks
from tests.harness.steps import Contract


def wrong_on_the_last_rank(model):
    """A `StepRun` that adds an error to one gradient there, before reductions."""
    inner = unwrap(model)
    finalize = inner.config.finalize_model_grads_func

    def wrong(*args, **options):
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            inner.decoder.layers[-1].self_attention.linear_proj.weight.main_grad += 1.0
        finalize(*args, **options)

    class Faulty(StepRun):
        def run(self):
            inner.config.finalize_model_grads_func = wrong
            try:
                return super().run()
            finally:
                inner.config.finalize_model_grads_func = finalize

    return Faulty


def data(seed, num, *, alike):
    """A group of rollouts; or as many that have nothing in common."""
    if alike:
        items = steps.group(seed, num)
    else:
        items = [steps.group(100 + seed + number, 1)[0] for number in range(num)]
    return [{name: _shorter(value) for name, value in item.items()} for item in items]


def _shorter(value):
    """Without the last position: 16 are left, which tensor-parallel ranks share."""
    return value[:, :-1] if isinstance(value, torch.Tensor) else value


def train(layout, model, faulty, config):
    """A step of one rank: its gradients with `verify`, with stock, and the report."""
    world = runtime.initialize(layout)
    made = [small_model(layout=layout, dtype=torch.float64, **model) for _ in range(2)]
    if faulty:
        schedules.StepRun = wrong_on_the_last_rank(made[0])  # in this rank's process
    schedule = PrefixSchedule(
        PrefixConfig(
            **{"min_gain": 0, "kernel": "math", "verify": 1, "min_speedup": 1e-9, **config}
        )
    )
    shard = world.rank if layout.dp > 1 or layout.ep > 1 else 0
    # With experts the second rank shares nothing; it must run both schedules all the same.
    items = data(shard, 4, alike=shard == 0 or layout.ep == 1)
    gradients, verifications = [], []
    for chunk, run in zip(made, (schedule, stock_schedule()), strict=True):
        steps.run(run, Contract().step, chunk, items)
        gradients.append(
            [bucket.grad_data.clone() for group in chunk.bucket_groups for bucket in group.buckets]
        )
        verifications.append(schedule.report.features["verify"])
    assert unwrap(made[0]) is not unwrap(made[1])
    equal = all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    return equal, verifications[0], schedule.report.decision.share


DDP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 20_000}


@pytest.mark.parametrize(("layout", "model", "config"), [
    (Layout(dp=2), DDP, {"mode": "on"}),
    (Layout(pp=2), {}, {"mode": "on"}),
    (Layout(ep=2, dp=2), {"name": "tiny-moe"}, {"mode": "on"}),
], ids=["dp2, distributed optimizer", "pp2", "ep2"])  # fmt: skip
def test_each_rank_gets_stocks_gradients_and_all_agree(layout, model, config):
    for equal, verification, share in run_ranks(2, train, layout, model, False, config):
        assert equal
        assert share
        assert verification.failure == ""
        assert verification.worst["gradients"].units < 1


def test_what_is_wrong_on_one_rank_is_named_on_all():
    named = run_ranks(2, train, Layout(pp=2), {}, True, {"mode": "auto"})
    for equal, verification, share in named:
        assert equal
        assert not share
        assert "self_attention.linear_proj.weight" in verification.failure


def unreduced(sums_gradients):
    """A step with a model in no wrapper, and prompts that cross ranks all the same: how many
    positions crossed, and what `verify` says."""
    world = runtime.initialize(Layout(dp=2))
    if not sums_gradients:
        across_step._in_the_way = lambda *_: None  # in this process
    config = PrefixConfig(
        min_gain=0, kernel="math", verify=1, mode="auto", min_speedup=1e-9, across_ranks="on"
    )
    schedule = PrefixSchedule(config, Callbacks(sums_gradients=sums_gradients))
    model, contract = small_model(dtype=torch.float64, wrap_ddp=False), Contract(per_token=True)
    contract.configure(model)
    items = data(0, 4, alike=True)  # every rank has half of a group
    steps.call(schedule, contract.step, model, items[2 * world.rank : 2 * world.rank + 2])
    crossed = schedule.report.crossed
    return crossed.received_tokens if crossed else 0, schedule.report.features["verify"].failure


def test_gradients_that_nobody_sums_are_caught():
    for crossed, failure in run_ranks(2, unreduced, False):
        assert crossed > 0
        assert "gradients" in failure
