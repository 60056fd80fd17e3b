"""What one of several ranks meets in a step gives it to the stock schedule on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_prefix import features
from megatron_prefix.config import PrefixConfig
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
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness.one_group import items
from tests.harness.pipelines import Result, difference, run_step
from tests.harness.ranks import run_ranks
from tests.harness.steps import Contract, Microbatch

LATER, NUM_STEPS = 1, 3
LAYOUTS = {
    "pp2": Layout(pp=2),
    "tp2": Layout(tp=2),
    "dp2, overlap": Layout(dp=2),
    "ep2": Layout(dp=2, ep=2),
}


@dataclass(frozen=True)
class Odd(Contract):
    """A trainer that does something else from some step on, on some data-parallel rank.

    Attributes:
        what: "twice": calls the model twice; "unmasked": its loss looks at all positions.
        ranks: data-parallel ranks that do.
    """

    what: str = ""
    ranks: tuple[int, ...] = (0,)
    number: int = 0

    @property
    def is_odd(self) -> bool:
        mine = parallel_state.get_data_parallel_rank() in self.ranks
        return self.number >= LATER and mine

    def step(self, data_iterator: Any, model: Any) -> Any:
        batch = next(data_iterator)

        def call() -> Any:
            return model(
                batch["tokens"], batch["position_ids"], None, labels=batch["labels"],
                loss_mask=batch["loss_mask"],
            )  # fmt: skip

        output = call()
        if self.what == "twice" and self.is_odd:
            output = output + 0.5 * call()
        return output, self.loss_func(batch)

    def loss_func(self, batch: Microbatch) -> Callable[..., Any]:
        if self.what == "unmasked" and self.is_odd:
            batch = {**batch, "loss_mask": torch.ones_like(batch["loss_mask"])}
        return Contract.loss_func(self, batch)


def chunks_of(layout: Layout, name: str) -> list[Any]:
    spec = resolve("tiny-moe" if layout.ep > 1 else "tiny-llama", num_layers=2).with_vocab(64)
    overlaps = "overlap" in name
    return build_model(
        spec, layout=layout, dtype="float64", overlap_grad_reduce=overlaps, bucket_size=4000
    )


def ours(min_speedup: float = 0.01) -> PrefixSchedule:
    config = PrefixConfig(min_gain=0, kernel="math", mode="auto", min_speedup=min_speedup)
    return PrefixSchedule(config)


def some_steps(schedule: Any, trainer: Odd, chunks: list[Any]) -> list[Result]:
    found = []
    for number in range(NUM_STEPS):
        own = items(4)
        contract = Odd(what=trainer.what, ranks=trainer.ranks, number=number)
        result = run_step(schedule, contract, chunks, own)
        copies = {name: one.clone() for name, one in result.gradients.items()}
        found.append(Result(result.logs, copies))
    return found


def stocks_step(trainer: Odd, chunks: list[Any]) -> Result:
    """A later step by the stock schedule; steps are alike, as nothing moves weights."""
    odd = replace(trainer, number=LATER)
    return run_step(get_forward_backward_func(), odd, chunks, items(4))


def differences(found: list[Result], its: Result, steps: range) -> list[str]:
    """Of the steps that the stock schedule runs, bit for bit."""
    said = []
    for number in steps:
        mine = found[number]
        if [x["loss"].item() for x in mine.logs] != [x["loss"].item() for x in its.logs]:
            said.append(f"losses of step {number}")
        for name, gradient in its.gradients.items():
            if not torch.equal(mine.gradients[name], gradient):
                said.append(f"{name} in step {number}")
    return said


def odd_job(name: str, cases: dict[str, Odd]) -> dict[str, Any]:
    """A rank's part: per case differences, the last reason, and how often steps fell back."""
    layout = LAYOUTS[name]
    runtime.initialize(layout)
    try:
        chunks, said = chunks_of(layout, name), {}
        for case, trainer in cases.items():
            mine = ours()
            found = some_steps(mine, trainer, chunks)
            wanted = stocks_step(trainer, chunks)
            assert mine.report is not None
            reason = mine.report.decision.reason
            wrong = differences(found, wanted, range(LATER, NUM_STEPS))
            said[case] = wrong, reason, mine.report.fallback_count
        return said
    finally:
        runtime.shutdown()


CASES = {
    "twice": (Odd(what="twice", ranks=(0, 1)), table.TWO_CALLS),
    "unmasked": (Odd(what="unmasked", ranks=(0, 1)), table.STRAY_GRADIENT),
    "unmasked on one": (Odd(what="unmasked", ranks=(0,)), table.STRAY_GRADIENT),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_met_while_segments_run(name: str) -> None:
    cases = {case: trainer for case, (trainer, _) in CASES.items()}
    for found in run_ranks(2, odd_job, name, cases):
        for case, (_, refusal) in CASES.items():
            wrong, reason, fallbacks = found[case]
            assert not wrong, (case, wrong)
            assert reason.endswith(refusal.fix), (case, reason)
            assert fallbacks >= NUM_STEPS - LATER, (case, fallbacks)


# --- errors of one rank's own ---------------------------------------------------------------------

PHASES = {
    "a call is caught": (suspend, "bound"),
    "calls are read": (step_reader, "read_calls"),
    "a plan is made": (planning.Planning, "proposed"),
    "payloads are placed": (step_run, "payload_map"),
    "memory is settled": (memory_control.MemoryControl, "settle"),
}


def faulty_job(name: str) -> dict[str, Any]:
    """A rank's part: rank 1 fails in one phase of step 1, and in step 2 no more."""
    layout = LAYOUTS[name]
    runtime.initialize(layout)
    try:
        chunks, said = chunks_of(layout, name), {}
        wanted = stocks_step(Odd(), chunks)
        for phase, (owner, function) in PHASES.items():
            mine, stock = ours(), getattr(owner, function)
            found, shared = [], []
            for number in range(NUM_STEPS):
                if dist.get_rank() == 1 and number == 1:
                    setattr(owner, function, None)  # which cannot be called
                try:
                    result = run_step(mine, Contract(), chunks, items(4))
                finally:
                    setattr(owner, function, stock)
                copies = {key: one.clone() for key, one in result.gradients.items()}
                found.append(Result(result.logs, copies))
                assert mine.report is not None
                shared.append(mine.report.decision.share)
                if number == 1:
                    reason = mine.report.decision.reason
            said[phase] = differences(found, wanted, range(1, 2)), reason, shared
        return said
    finally:
        runtime.shutdown()


@pytest.mark.parametrize("name", ["pp2", "ep2"])
def test_an_error_of_one_rank_before_segments_run(name: str) -> None:
    for found in run_ranks(2, faulty_job, name):
        assert found.keys() == PHASES.keys()
        for phase, (wrong, reason, shared) in found.items():
            assert not wrong, (phase, wrong)
            assert "TypeError" in reason and reason.endswith(table.OWN_ERROR.fix), (phase, reason)
            assert shared == [True, False, True], (phase, shared)


# --- what a call is made of -----------------------------------------------------------------------


def config_job() -> tuple[str, bool]:
    """A rank's part: the config says one stage, and the groups say two."""
    layout = LAYOUTS["pp2"]
    runtime.initialize(layout)
    try:
        chunks, mine = chunks_of(layout, "pp2"), ours()
        unwrap(chunks[0]).config.pipeline_model_parallel_size = 1
        wanted = run_step(get_forward_backward_func(), Contract(), chunks, items(4))
        found = run_step(mine, Contract(), chunks, items(4))
        assert mine.report is not None
        return difference(wanted, found, chunks, 100), mine.report.decision.share
    finally:
        runtime.shutdown()


def test_a_config_that_says_another_number_of_stages() -> None:
    assert run_ranks(2, config_job) == [("", True)] * 2


def rank_job(name: str) -> tuple[list[str], str, int]:
    """A rank's part: rank 1 cannot say what its model is, in any step."""
    layout = LAYOUTS[name]
    runtime.initialize(layout)
    try:
        chunks, mine = chunks_of(layout, name), ours()
        if dist.get_rank() == 1:
            rank_module.cost_of = None  # type: ignore[assignment]
        found = some_steps(mine, Odd(), chunks)
        wanted = stocks_step(Odd(), chunks)
        assert mine.report is not None
        wrong = differences(found, wanted, range(NUM_STEPS))
        return wrong, mine.report.decision.reason, mine.report.fallback_count
    finally:
        runtime.shutdown()


@pytest.mark.parametrize("name", ["pp2", "ep2"])
def test_a_rank_that_cannot_say_what_its_model_is(name: str) -> None:
    for wrong, reason, fallbacks in run_ranks(2, rank_job, name, timeout_s=60):
        assert not wrong and fallbacks == NUM_STEPS
        assert "TypeError" in reason and reason.endswith(table.OWN_ERROR.fix)


def uneven_job() -> list[bool]:
    """A rank's part: rank 1 has nothing to share, and reductions overlap."""
    layout = LAYOUTS["dp2, overlap"]
    runtime.initialize(layout)
    try:
        chunks, mine = chunks_of(layout, "dp2, overlap"), ours(1.2)
        data = items(4)
        if dist.get_rank() == 1:
            data = [
                {**one, "tokens": (one["tokens"] + 9 * number) % 60}
                for number, one in enumerate(data)
            ]
        shared = []
        for _ in range(3):
            run_step(mine, Contract(), chunks, data)
            assert mine.report is not None
            shared.append(mine.report.decision.share)
        return shared
    finally:
        runtime.shutdown()


def test_a_rank_without_anything_to_share_answers_too() -> None:
    first, second = run_ranks(2, uneven_job, timeout_s=60)
    assert first == second


def parts_job(broken: bool) -> list[str]:
    """A rank's part: the parts of a call, where rank 1 cannot import what makes steps faster."""
    layout = LAYOUTS["tp2"]
    runtime.initialize(layout)
    try:
        chunks = chunks_of(layout, "tp2")
        if broken and dist.get_rank() == 1:
            nowhere = (each._replace(path=each.path.replace("graphs", "none")) for each in PARTS)
            features.PARTS = tuple(nowhere)
        config = PrefixConfig(mode="auto", graph_tokens=64)
        requests = Requests(config)
        request = requests.of(
            dict(model=chunks, pg_collection=None, forward_only=False, forward_step_func=parts_job),
            Callbacks(),
        )
        assert isinstance(request, Request), request
        return [type(part).__name__ for part in request.parts]
    finally:
        runtime.shutdown()


def test_a_part_that_one_rank_lacks_is_left_out_on_all() -> None:
    """Graphs pad segments to lengths that come again: ranks of different lengths would hang."""
    assert run_ranks(2, parts_job, False) == [["Graphs"]] * 2
    assert run_ranks(2, parts_job, True) == [[]] * 2
