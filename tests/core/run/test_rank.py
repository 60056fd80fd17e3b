"""What a model says: read once, and again where an option changes; it keeps no model. What one of
several ranks meets in a step gives it to the stock schedule on all of them; rows of what all ranks
meet: tests/test_cases_on_ranks.py."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn

from megatron_prefix import PrefixConfig, PrefixSchedule, features
from megatron_prefix.errors import CannotShare
from megatron_prefix.features import PARTS
from megatron_prefix.features.vision import models
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.refusals import table
from megatron_prefix.run import planning, request, step_reader, step_run
from megatron_prefix.run import rank as rank_module
from megatron_prefix.run import route as routes
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.execute import memory_control
from megatron_prefix.run.parts_of_call import chosen
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.read import suspend
from megatron_prefix.run.request import Request
from megatron_prefix.run.route import Requests, route
from tests.core.megatron.test_families import Wrapper, named
from tests.harness import steps
from tests.harness.one_group import items, run, schedule_with
from tests.harness.one_rank import one_rank, small_model
from tests.harness.ranks import run_ranks
from tests.harness.steps import Contract, assert_bitwise, assert_gradients


def test_numbers_are_made_once_until_an_option_changes():
    with one_rank():
        model = small_model()
        first, again = Rank.of([model]), Rank.of([model], forward_only=True)
        assert again.model.cost is first.model.cost and again.model.payloads is first.model.payloads
        dropped = first.act
        assert dropped > 0
        first.config.recompute_granularity = "full"
        first.config.recompute_method, first.config.recompute_num_layers = "uniform", 1
        assert Rank.of([model]).act == 0
        first.config.recompute_granularity, first.config.recompute_modules = "selective", []
        assert Rank.of([model]).act == dropped
        first.config.recompute_modules.append("mlp")  # in place
        assert Rank.of([model]).act == 0


def test_a_tower_that_comes_later_is_seen():
    with one_rank():
        model = Wrapper(nn.Linear(2, 2))
        assert not chosen(PrefixConfig(), Rank.of([model]), Callbacks())
        model.vision_model = named(next(iter(models.TOWERS)), nn.Linear)(2, 2)
        (images,) = chosen(PrefixConfig(), Rank.of([model]), Callbacks())
        assert images.runs_outside


# Who runs a call: ways to Megatron's schedule, and the way to segments ----------------------------


def test_a_refused_first_call_leaves_no_part_out_of_later_ones(monkeypatch):
    with one_rank():
        model = small_model()
        requests = routes.Requests(PrefixConfig(mode="auto", graph_tokens=64))
        call = dict(model=model, pg_collection=None, forward_only=False, forward_step_func=route)
        monkeypatch.setattr(routes, "is_untried", lambda _: True)
        assert isinstance(requests.of(call, Callbacks()), CannotShare)
        monkeypatch.undo()
        for _ in range(2):
            request = requests.of(call, Callbacks())
            assert isinstance(request, Request)
            assert [type(part).__name__ for part in request.parts] == ["Graphs"]


# Mode auto stops looking at steps for a while where sharing does not pay, on all ranks or none ----

VOCAB = 64


def kinds(schedule, model, num, **options):
    """A letter for each of so many steps: S shared, L looked at and not shared, - not looked at."""
    letters = ""
    for _ in range(num):
        run(schedule, model, **options)
        letters += letter(schedule)
    return letters


def letter(schedule):
    decision = schedule.report.decision
    return "S" if decision.share else "-" if "looks again" in decision.reason else "L"


def test_steps_that_do_not_pay_are_not_looked_at(monkeypatch, caplog):
    monkeypatch.setattr(request, "STEPS", 4)
    with one_rank():
        model = small_model()
        schedule = schedule_with(mode="auto", min_speedup=100.0)
        first = kinds(schedule, model, 20).lstrip("L")
        assert first.startswith("----L----")
        assert_bitwise(run(schedule, model), run(stock_schedule(), small_model()))
        assert schedule.report.fallback_count == 21
        assert sum("looks again" in record.getMessage() for record in caplog.records) <= 1
        object.__setattr__(schedule.config, "min_speedup", 0.01)
        later = kinds(schedule, model, 8).lstrip("-")
        assert later == "S" * len(later) and len(later) >= 3


def letters_of(least, across_ranks="off"):
    """What every data-parallel rank does in twelve steps, with a `min_speedup` each."""
    request.STEPS = 4
    layout = Layout(dp=2)
    runtime.initialize(layout)
    chunks = build_model(resolve("tiny-llama", num_layers=1).with_vocab(VOCAB), layout=layout)
    items = align.microbatches(list(generate(1, 96, 8, 4, vocab_size=VOCAB)), 7)
    min_speedup = least[parallel_state.get_data_parallel_rank()]
    config = PrefixConfig(
        mode="auto", min_gain=0, min_speedup=min_speedup, across_ranks=across_ranks
    )
    schedule = PrefixSchedule(config)
    letters = ""
    for _ in range(12):
        align.run_step(schedule, chunks, items, optimize=False)
        letters += letter(schedule)
    heard = [None, None]
    torch.distributed.all_gather_object(heard, letters)
    return heard


@pytest.mark.parametrize(("least", "pauses"), [((100, 100), True), ((100, 0.01), False)])
def test_data_parallel_ranks_pause_together(least, pauses):
    first, second = run_ranks(2, letters_of, least)[0]
    if pauses:
        assert first == second and "----L" in first
    else:
        assert (set(first), set(second)) == ({"L"}, {"S"})


def test_where_prompts_cross_the_most_cautious_rank_decides():
    """Else one would wait for the other's messages."""
    first, second = run_ranks(2, letters_of, (1e-6, 100), "on")[0]
    assert first == second and "S" not in first


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
    return steps.run(get_forward_backward_func(), contract.step, chunks, items(4))


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
    steps.run(mine, Contract().step, chunks, items(4))
    assert mine.report is not None and mine.report.decision.share
    found = steps.run(mine, Unmasked().step, chunks, items(4))
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
            result = steps.run(mine, Contract().step, chunks, items(4))
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
    found = steps.run(mine, Contract().step, chunks, items(4))
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
