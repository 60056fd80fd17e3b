"""What a model says: read once, and again where an option changes; it keeps no model."""

import pytest
import torch
from megatron.core import parallel_state
from torch import nn

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.errors import CannotShare
from megatron_prefix.features.vision import models
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.run import request
from megatron_prefix.run import route as routes
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.parts_of_call import chosen
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.request import Request
from megatron_prefix.run.route import route
from tests.core.megatron.test_families import Wrapper, named
from tests.harness.one_group import run, schedule_with
from tests.harness.one_rank import one_rank, small_model
from tests.harness.ranks import run_ranks
from tests.harness.steps import assert_bitwise


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
