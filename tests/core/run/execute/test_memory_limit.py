"""A step takes no more memory than Megatron's own and a twentieth, or mode auto runs Megatron's."""

import random

import pytest
import torch

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.lab.predict.execution import Execution
from megatron_prefix.lab.predict.model import footprint_of
from megatron_prefix.lab.predict.peak_memory import predict_memory
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.plan import prediction
from megatron_prefix.plan.planner import make_plan
from megatron_prefix.plan.prediction import heaviest_stock_plan
from megatron_prefix.tree import Forest, Segment, Span
from tests.harness import steps
from tests.harness.one_rank import small_model
from tests.harness.predicted import counted_step
from tests.harness.trees import flat_rollouts

pytestmark = pytest.mark.usefixtures("on_one_rank")

VOCAB = 128


@pytest.fixture
def model(monkeypatch):
    """No bytes are too few to count."""
    monkeypatch.setattr(prediction, "LEAST_OVER", 0.0)
    return small_model("tiny-llama", vocab=VOCAB, spec={"num_layers": 2}, dtype=torch.float32)


def batches(order, prompt=160, response=32, size=2):
    """Five groups of six, two rollouts a microbatch: 384 positions are alive in stock's."""
    rollouts, _ = flat_rollouts(prompt, response, 6, 5)
    return steps.dealt(rollouts, size, 0 if order == "shuffled" else None)


@pytest.mark.parametrize("order", ["in groups", "shuffled"])
def test_counted_bytes_keep_the_limit(order, model):
    items = batches(order)
    stock, _ = counted_step(stock_schedule(), model, items)
    peaks, gradients = {}, {}
    for memory in ("retain", "auto"):
        schedule = PrefixSchedule(PrefixConfig(segment_tokens=96, min_gain=0, memory=memory))
        peaks[memory], gradients[memory] = counted_step(schedule, model, items)
    # The stock schedule's attention on the CPU saves more, its scores.
    weights = sum(2 * p.numel() * p.element_size() for p in model.parameters())
    limit = schedule.memory.limit
    assert limit <= 1.05 * stock + 0.05 * weights
    assert peaks["auto"] <= 1.1 * limit  # as exact as the model of memory is
    # In groups one prompt lives at a time, else all five.
    assert (peaks["retain"] > 1.1 * limit) == (order == "shuffled")
    assert ("recompute" in schedule.report.plan.policies) == (order == "shuffled")
    assert torch.equal(gradients["auto"], gradients["retain"])


@pytest.mark.parametrize(("memory", "budget", "why"), [
    ("retain", 0.0, "and the limit, the stock schedule's peak and 5 %, is"),
    ("auto", 1e-6, "and memory_budget_gb is 1e-06"),
])  # fmt: skip
def test_a_step_that_cannot_keep_it_is_stocks(memory, budget, why, model, caplog):
    """In mode auto; mode on shares all the same, and warns once of a budget."""
    items = batches("shuffled")
    options = dict(segment_tokens=192, min_gain=0, memory=memory, min_speedup=0.01)
    options["memory_budget_gb"] = budget
    schedule = PrefixSchedule(PrefixConfig(mode="auto", **options))
    counted_step(schedule, model, items)
    decision = schedule.report.decision
    assert decision.fallback and why in decision.reason and decision.reason in caplog.text
    caplog.clear()
    schedule = PrefixSchedule(PrefixConfig(mode="on", **options))
    for _ in range(2):
        counted_step(schedule, model, items)
        assert schedule.report.decision.share and not schedule.report.decision.fallback
    assert caplog.text.count("mode on shares this step anyway: sharing would take") == (budget > 0)


@pytest.mark.parametrize("num_pipelines", [2, 3])
def test_the_largest_rank_of_those_that_share_experts_counts(num_pipelines):
    """Neither the mean nor the sum, and no window of microbatches reaches over two of them."""
    lengths = [(40, 40, 40), (40, 90, 90), (10, 10, 95)][:num_pipelines]
    *alone, union = (Forest((), mine, mine) for mine in (*lengths, sum(lengths, ())))
    for num_ranks in (1, 2):
        found = heaviest_stock_plan(union, [range(3)] * num_pipelines, num_ranks)
        wanted = [heaviest_stock_plan(one, [range(3)], num_ranks) for one in alone]
        sums = [sum(s.padded_length for s in plan.segments) for plan in (found, *wanted)]
        assert sums[0] == max(sums[1:])


@pytest.mark.parametrize("num_chunks", [2])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_heaviest_microbatches_are_the_steps_peak(num_ranks, num_chunks):
    footprint = footprint_of(
        small_model("tiny-llama", vocab=VOCAB, spec={"num_layers": 8}).config,
        Execution(num_stages=num_ranks * num_chunks), VOCAB,
    )  # fmt: skip
    for seed in range(6):
        rng = random.Random(seed)
        lengths = tuple(rng.choice((30, 90)) if seed else 40 for _ in range(4 * num_ranks))
        spans = [Span(0, length, length, (number,)) for number, length in enumerate(lengths)]
        segments = tuple(Segment((span,), inner=False, scored=True) for span in spans)
        forest = Forest(segments, lengths, tuple(length - 1 for length in lengths))
        each = list(range(len(lengths)))
        whole = make_plan(forest, num_ranks, num_chunks=num_chunks, run_ahead=1)
        part = heaviest_stock_plan(forest, [each], num_ranks, num_chunks)
        peaks = [max(one.peak for one in predict_memory(plan, footprint)) for plan in (part, whole)]
        assert 0.8 * peaks[1] <= peaks[0] <= peaks[1]
        assert seed or peaks[0] == peaks[1]
