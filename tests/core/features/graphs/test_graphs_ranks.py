"""Ranks whose layers run on CUDA graphs capture and choose alike; launches are noted and launched
again. Rows that compare such steps: tests/test_cases_on_ranks.py."""

import pytest
import torch
import torch.distributed as dist

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.features.graphs import choice, cuda
from megatron_prefix.features.graphs.part import graphs_of
from megatron_prefix.features.graphs.segment_graphs import SegmentGraphs
from megatron_prefix.features.measure import cost_meter
from megatron_prefix.lab import runtime
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.build import build_model, unwrap
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from tests.core.features.graphs.test_graphs_auto import CONFIG as AUTO
from tests.harness.ranks import run_ranks
from tests.harness.recorded import RecordedGraph, choice_of, recorded_graphs  # noqa: F401

TP2, PP2, DP2 = Layout(tp=2, sequence_parallel=True), Layout(pp=2), Layout(dp=2)
CONFIG = PrefixConfig(
    kernel="math", min_gain=4, segment_tokens=24, memory="retain", graph_tokens=64
)
STEPS = 2
WHEN = {"weights move": STEPS - 1, "a hook": 0, "nothing": STEPS, "no memory": 0}
"""What happens on the first rank alone, and in which step."""


def chunks_of(layout, num_layers):
    spec = resolve("tiny-llama", num_layers=num_layers).with_vocab(64)
    return build_model(spec, layout=layout, dtype="float64")


def captured(cases):
    """How often a tensor-parallel rank's layers were captured in some steps of each case, of so
    many layers, and why not."""
    runtime.initialize(TP2, "cpu")
    found = []
    for what, num_layers in cases:
        chunks, schedule = chunks_of(TP2, num_layers), PrefixSchedule(CONFIG)
        for seed in range(STEPS):
            if seed == WHEN[what] and dist.get_rank() == 0:
                happen(what, unwrap(chunks[0]).decoder.layers[0].mlp.linear_fc1)
            groups = list(generate(2, 24, 8, 3, vocab_size=64, seed=seed))
            align.run_step(schedule, chunks, align.microbatches(groups, seed, 2), optimize=False)
        graphs = graphs_of(chunks[0])
        found.append((graphs.captures, graphs.refused))
    return found


def happen(what, module):
    if what == "weights move":
        module.weight.data = module.weight.data.clone()
    elif what == "a hook":
        module.register_forward_hook(lambda *_: None)
    else:
        capture = SegmentGraphs.capture

        def failing(*arguments):
            capture(*arguments)
            raise torch.OutOfMemoryError("no memory here")

        SegmentGraphs.capture = failing  # the rank's own process


@pytest.mark.usefixtures("recorded_graphs")
def test_tensor_parallel_ranks_capture_together():
    """NCCL wants ranks to launch a collective alike, and none waits for another for ever. A stage
    of one layer, which runs on what is read, has none."""
    cases = [("nothing", 1), *((what, 2) for what in WHEN)]
    ranks = run_ranks(2, captured, cases, timeout_s=60.0)
    both = {what: (ranks[0][number], ranks[1][number]) for number, what in enumerate(cases)}
    numbers = {what: [captures for captures, _ in found] for what, found in both.items()}
    for what in (("nothing", 1), ("a hook", 2), ("no memory", 2)):
        assert numbers[what] == [0, 0], what
    [undisturbed, same] = numbers["nothing", 2]
    assert undisturbed == same > 0
    assert numbers["weights move", 2] == [2 * undisturbed] * 2
    (_, first), (_, second) = both["no memory", 2]
    assert "no memory here" in first and "another tensor-parallel rank" in second


def chosen(layout, num_steps):
    """What a rank has chosen after each step, and whether it has replayed graphs in it."""
    runtime.initialize(layout, "cpu")
    chunks, schedule = chunks_of(layout, 2), PrefixSchedule(AUTO)
    tokens, replayed = [], []
    for step in range(num_steps):
        # Data-parallel ranks have trees of their own, and one may share nothing.
        num = 1 if layout.dp > 1 and step == 3 and dist.get_rank() == 1 else 3
        seed = step + 100 * (layout.dp > 1) * align.data_rank()
        items = align.microbatches([*generate(2, 24, 9, num, vocab_size=64, seed=seed)], seed)
        before = cuda.Graph.replays
        align.run_step(schedule, chunks, items, optimize=False)
        tokens.append(choice_of(schedule).tokens)
        replayed.append(cuda.Graph.replays > before)
    return tokens, replayed


@pytest.mark.parametrize("layout", [PP2, DP2], ids=str)
def test_ranks_choose_alike(
    layout,
    monkeypatch,
    recorded_graphs,  # noqa: F811
):
    """In every step, and none waits for another for ever."""
    monkeypatch.setattr(cost_meter, "EVERY", 8)
    monkeypatch.setattr(choice, "PAYS", 0.0)
    (tokens, replayed), (others, _) = run_ranks(2, chosen, layout, 10, timeout_s=60.0)
    assert tokens == others
    # Five steps without, one or two that capture them, and the next two decide.
    num = tokens.count(32)
    assert tokens == [0] * 4 + [32] * num + [0] * (6 - num) and 3 <= num <= 4
    assert any(replayed[5:8]) and not any(replayed[:5]) and not replayed[9]
