"""What one of several ranks meets in a step gives it to the stock schedule on all of them; rows of
what all ranks meet: tests/test_cases_on_ranks.py."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_prefix import PrefixConfig, PrefixSchedule, features
from megatron_prefix.features import PARTS
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.refusals import table
from megatron_prefix.run import planning, step_reader, step_run
from megatron_prefix.run import rank as rank_module
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.execute import memory_control
from megatron_prefix.run.read import suspend
from megatron_prefix.run.request import Request
from megatron_prefix.run.route import Requests
from tests.harness.one_group import items
from tests.harness.ranks import run_ranks
from tests.harness.steps import Contract, assert_gradients, run

NUM_STEPS = 3
PP2, TP2, DP2, EP2 = Layout(pp=2), Layout(tp=2), Layout(dp=2), Layout(dp=2, ep=2)


@dataclass(frozen=True)
class Unmasked(Contract):
    """A trainer whose loss looks at all positions, on the first data-parallel rank."""

    def loss_func(self, batch):
        if not parallel_state.get_data_parallel_rank():
            batch = {**batch, "loss_mask": torch.ones_like(batch["loss_mask"])}
        return Contract.loss_func(self, batch)


def chunks_of(layout):
    """Reductions overlap where nothing but data-parallel ranks is there."""
    runtime.initialize(layout)
    spec = resolve("tiny-moe" if layout.ep > 1 else "tiny-llama", num_layers=2).with_vocab(64)
    return build_model(
        spec, layout=layout, dtype="float64", overlap_grad_reduce=layout == DP2, bucket_size=4000
    )


def ours(min_speedup=0.01):
    config = PrefixConfig(min_gain=0, kernel="math", mode="auto", min_speedup=min_speedup)
    return PrefixSchedule(config)


def stocks_step(chunks, contract):
    """By the stock schedule; steps are alike, as nothing moves weights."""
    return run(get_forward_backward_func(), contract.step, chunks, items(4))


def difference_of(found, its):
    """What is not as it is, bit for bit."""
    said = [
        name
        for name, gradient in its.gradients.items()
        if not torch.equal(found.gradients[name], gradient)
    ]
    alike = [x["loss"].item() for x in found.logs] == [x["loss"].item() for x in its.logs]
    return said if alike else ["losses", *said]


def a_loss_of_one_rank():
    """A rank's part: what is not stock's in a step that turns out to be odd there, and why."""
    chunks, mine = chunks_of(DP2), ours()
    run(mine, Contract().step, chunks, items(4))
    assert mine.report is not None and mine.report.decision.share
    found = run(mine, Unmasked().step, chunks, items(4))
    return difference_of(found, stocks_step(chunks, Unmasked())), mine.report.decision.reason


def test_a_loss_of_one_rank_is_undone_on_all():
    for wrong, reason in run_ranks(2, a_loss_of_one_rank):
        assert not wrong and reason.endswith(table.STRAY_GRADIENT.fix)


PHASES = {
    "what the model is": (rank_module, "cost_of"),
    "a call is caught": (suspend, "bound"),
    "calls are read": (step_reader, "read_calls"),
    "a plan is made": (planning.Planning, "proposed"),
    "payloads are placed": (step_run, "payload_map"),
    "memory is settled": (memory_control.MemoryControl, "settle"),
}
"""The first fails in every step, the others in the second."""


def faulty_job(layout):
    """A rank's part: rank 1 fails in one phase of a step, and afterwards no more."""
    chunks, said = chunks_of(layout), {}
    wanted = stocks_step(chunks, Contract())
    for phase, (owner, function) in PHASES.items():
        mine, stock, shared = ours(), getattr(owner, function), []
        fails = [*range(NUM_STEPS)] if phase == "what the model is" else [1]
        for number in range(NUM_STEPS):
            if dist.get_rank() == 1 and number in fails:
                setattr(owner, function, None)  # which cannot be called
            result = run(mine, Contract().step, chunks, items(4))
            setattr(owner, function, stock)
            shared.append(mine.report.decision.share)
            if number in fails:
                wrong, reason = difference_of(result, wanted), mine.report.decision.reason
        said[phase] = wrong, reason, shared == [number not in fails for number in range(NUM_STEPS)]
    return said


@pytest.mark.parametrize("layout", [PP2, EP2], ids=str)
def test_an_error_of_one_rank_before_segments_run(layout):
    for found in run_ranks(2, faulty_job, layout, timeout_s=60):
        assert found.keys() == PHASES.keys()
        for phase, (wrong, reason, others_are_shared) in found.items():
            assert not wrong, (phase, wrong)
            assert "TypeError" in reason and reason.endswith(table.OWN_ERROR.fix), (phase, reason)
            assert others_are_shared, phase


def config_job():
    """A rank's part: the config says one stage, and the groups say two."""
    chunks, mine = chunks_of(PP2), ours()
    unwrap(chunks[0]).config.pipeline_model_parallel_size = 1
    wanted = stocks_step(chunks, Contract())
    found = run(mine, Contract().step, chunks, items(4))
    assert_gradients(found.gradients, wanted.gradients, 100)
    return mine.report.decision.share


def test_a_config_that_says_another_number_of_stages():
    assert run_ranks(2, config_job) == [True] * 2


def parts_job():
    """A rank's part: the parts of a call, before and after rank 1 cannot import what makes steps
    faster."""
    chunks, found = chunks_of(TP2), []
    for broken in (False, True):
        if broken and dist.get_rank() == 1:
            nowhere = (each._replace(path=each.path.replace("graphs", "none")) for each in PARTS)
            features.PARTS = tuple(nowhere)
        requests = Requests(PrefixConfig(mode="auto", graph_tokens=64))
        call = dict(
            model=chunks, pg_collection=None, forward_only=False, forward_step_func=parts_job
        )
        request = requests.of(call, Callbacks())
        assert isinstance(request, Request), request
        found.append([type(part).__name__ for part in request.parts])
    return found


def test_a_part_that_one_rank_lacks_is_left_out_on_all():
    """Graphs pad segments to lengths that come again: ranks of different lengths would hang."""
    assert run_ranks(2, parts_job) == [[["Graphs"], []]] * 2
