"""Mode auto stops looking at steps for a while where sharing does not pay, on all ranks or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.run import request
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness.one_group import assert_bitwise, run, schedule_with
from tests.harness.one_rank import one_rank, small_model
from tests.harness.ranks import run_ranks

VOCAB = 64


def kinds(schedule: Any, model: Any, num: int, **options: Any) -> str:
    """A letter for each of so many steps: S shared, L looked at and not shared, - not looked at."""
    letters = ""
    for _ in range(num):
        run(schedule, model, **options)
        letters += letter(schedule)
    return letters


def letter(schedule: Any) -> str:
    decision = schedule.report.decision
    return "S" if decision.share else "-" if "looks again" in decision.reason else "L"


def test_steps_that_do_not_pay_are_not_looked_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_passes_without_gradients_and_mode_on_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request, "STEPS", 4)
    with one_rank():
        model = small_model()
        schedule = schedule_with(mode="auto", min_speedup=100.0)
        assert "-" not in kinds(schedule, model, 6, forward_only=True)
        assert kinds(schedule_with(mode="on"), model, 6) == "S" * 6


def letters_of(least: tuple[float, float], across_ranks: str = "off") -> list[str]:
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
    heard: list[Any] = [None, None]
    torch.distributed.all_gather_object(heard, letters)
    return heard


@pytest.mark.parametrize(("least", "pauses"), [((100, 100), True), ((100, 0.01), False)])
def test_data_parallel_ranks_pause_together(least: tuple[float, float], pauses: bool) -> None:
    first, second = run_ranks(2, letters_of, least)[0]
    if pauses:
        assert first == second and "----L" in first
    else:
        assert (set(first), set(second)) == ({"L"}, {"S"})


def test_where_prompts_cross_the_most_cautious_rank_decides() -> None:
    """Else one would wait for the other's messages."""
    first, second = run_ranks(2, letters_of, (1e-6, 100), "on")[0]
    assert first == second and "S" not in first
