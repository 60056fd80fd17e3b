"""Ranks decide on CUDA graphs together in mode "auto"; launches are emulated."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.graphs import choice, cuda
from megatron_prefix.features.measure import cost_meter
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.run.schedule import PrefixSchedule
from tests.core.features.graphs.test_graphs_auto import CONFIG
from tests.harness.ranks import run_ranks
from tests.harness.recorded import RecordedGraph, choice_of, recorded_graphs  # noqa: F401

pytestmark = pytest.mark.turns

LAYOUTS = {"TP2+SP": Layout(tp=2, sequence_parallel=True), "PP2": Layout(pp=2), "DP2": Layout(dp=2)}
SPEC = resolve("tiny-llama", num_layers=2).with_vocab(64)
STEPS, EVERY = 9, 8


def chosen(layout: Layout, across: str) -> tuple[list[int], list[bool]]:
    """What a rank has chosen after each step, and whether it has replayed graphs in it."""
    runtime.initialize(layout, "cpu")
    chunks = build_model(SPEC, layout=layout, dtype="float64")
    schedule = PrefixSchedule(PrefixConfig(**{**vars(CONFIG), "across_ranks": across}))
    tokens, replayed = [], []
    for step in range(STEPS):
        # Data-parallel ranks have trees of their own; where nothing crosses, one may share nothing.
        alone = layout.dp > 1 and across == "off" and step == 3
        num = 1 if alone and dist.get_rank() == 1 else 3
        seed = step + 100 * (layout.dp > 1 and across == "off") * align.data_rank()
        groups = [*generate(2, 24, 9, num, vocab_size=64, seed=seed)]
        items = align.microbatches(groups, seed, align.alignment(SPEC, layout))
        before = cuda.Graph.replays
        align.run_step(schedule, chunks, items, optimize=False)
        tokens.append(choice_of(schedule).tokens)
        replayed.append(cuda.Graph.replays > before)
    return tokens, replayed


@pytest.mark.parametrize(
    ("name", "across"), [("TP2+SP", "off"), ("PP2", "off"), ("DP2", "off"), ("DP2", "auto")]
)
def test_ranks_choose_alike(
    name: str,
    across: str,
    monkeypatch: pytest.MonkeyPatch,
    recorded_graphs: type[RecordedGraph],  # noqa: F811
) -> None:
    """In every step, and none waits for another for ever."""
    monkeypatch.setattr(cost_meter, "EVERY", EVERY)
    monkeypatch.setattr(choice, "PAYS", 0.0)
    (tokens, replayed), (others, _) = run_ranks(2, chosen, LAYOUTS[name], across, timeout_s=60.0)
    assert tokens == others
    # Four steps without, three with them, and the one that is timed decides.
    assert not any(tokens[:4]) and all(tokens[4:7]) and not any(tokens[7:])
    assert any(replayed[5:8]) and not any(replayed[:5]) and not replayed[8]
