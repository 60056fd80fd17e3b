"""Which context-parallel ranks decide together; steps are rows of tests/test_cases_on_ranks.py."""

import collections
import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from megatron_prefix import PrefixConfig, PrefixSchedule
from megatron_prefix.lab import runtime
from megatron_prefix.lab.cli.main import main
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.plans.forest import trees
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.run.execute.memory_control import MemoryControl
from megatron_prefix.tree.payload_map import payload_map
from tests.core.alignment.test_issue_order import recorded
from tests.harness.data import BUNDLED
from tests.harness.predicted import predicted_bytes
from tests.harness.ranks import run_ranks

VOCAB = 64


class Decided(Exception):
    """Ends a step."""


def decisions(budgets):
    """For each budget of memory what all ranks decide, which share experts and have other trees."""
    layout = Layout(dp=2, cp=2, ep=4)
    runtime.initialize(layout)
    model = resolve("tiny-moe", num_layers=2).with_vocab(VOCAB)
    chunks = build_model(model, layout=layout, dtype="float32")
    shape = ((256, 128, 8), (128, 32, 8))[parallel_state.get_data_parallel_rank()]
    groups = list(generate(1, *shape, vocab_size=VOCAB, uneven=True))
    items = align.on_this_cp_rank(align.microbatches(groups, 7, layout.alignment))
    found: list[list[Any]] = []
    settle = MemoryControl.settle

    def heard(control, plan, *more):
        found.append([None] * 4)
        settle(control, plan, *more)
        torch.distributed.all_gather_object(found[-1], (control.gathers, plan.policies))
        raise Decided

    MemoryControl.settle = heard
    for budget in budgets:
        config = PrefixConfig(
            min_gain=0, chunk_tokens=64, segment_tokens=256, memory="auto", memory_budget_gb=budget
        )
        with contextlib.suppress(Decided), predicted_bytes():
            align.run_step(PrefixSchedule(config), chunks, items, optimize=False)
    return found


def test_ranks_that_share_experts_decide_alike():
    """Else one sends tokens to experts more often than another, which never ends."""
    budgets = np.geomspace(1e-3, 5e-2, 12).tolist()
    found = run_ranks(4, decisions, budgets)[0]
    assert len(found) == len(budgets)
    assert all(len({*one}) == 1 for one in found)
    assert len({one[0][0] for one in found}) == 2, "there is nothing to decide"


def test_a_sidecar_on_the_host_is_refused(capsys):
    arguments = "--groups 1 --max-tokens 64 --cp 2 --cache-host-layers 1 --set num_layers=1"
    assert main(["align", "--rollouts", str(BUNDLED), *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "cache_host_layers is for whole sequences" in captured.err


# What ranks send one another in a step, counted ---------------------------------------------------


GROUPS = [*generate(2, 15, 34, 3, vocab_size=64, uneven=True, tree="turns", depth=2)]
"""Turns are trained, and shared."""


def gives(issued, given):
    """What a rank gives to a collective: its group, its kind, and elements of a type."""
    names = {"input_tensor", "input", "tensor"} & given.keys()
    return issued.group, issued.kind, *((given[n].dtype, given[n].numel()) for n in names)


def expected_traffic(forest, program, num_layers, width, recompute, reduce, num_local):
    """K/V there and gK/gV back, each of `width` elements a token and layer, a number a token of a
    scored segment, and the tokens once. Of the last layer of a segment without loss nobody reads
    the output: only K and V are there."""
    size, seen = 2, collections.Counter()
    layout = payload_map(forest.segments, program, size, size if reduce == "wave" else 1)

    def gather(rows, times):
        seen["all_gather_into_tensor", (torch.float64, rows * 2 * width)] += times

    def scatter(rows, times):
        seen["reduce_scatter_tensor", (torch.float64, size * rows * 2 * width)] += times

    for index, segment in enumerate(forest.segments):
        rows = segment.padded_length // size
        attending = num_layers if segment.scored else num_layers - 1
        if reduce == "segment" and segment.inner:
            gather(rows, num_layers)  # kept until the backward, also where only K and V are there
            scatter(rows, num_layers)  # with what descendants have sent
        else:
            gather(rows, attending * (3 if recompute else 2))
            scatter(rows, attending)
        for level in layout.levels[index] if reduce == "wave" else ():
            gather(sum(level.keys), attending * 2)  # recomputation shares the backward's
            scatter(sum(level.keys), attending)
        if segment.scored:
            seen["all_gather_into_tensor", (torch.float64, rows)] += 1
            seen["reduce_scatter_tensor", (torch.float64, size * rows)] += 1
    seen["all_gather_into_tensor", (torch.int64, 3 * num_local)] += 1
    seen["all_reduce", (torch.int64, 2)] += 3  # ranks agree before, between and after segments
    return seen


def traffic(recompute, reduce, options):
    layout, model = Layout(cp=2), resolve("tiny-llama", num_layers=2).with_vocab(64)
    runtime.initialize(layout)
    chunks = build_model(model, layout=layout, dtype="float64", recompute=recompute)
    items = align.on_this_cp_rank(align.microbatches(GROUPS, 7, layout.alignment))
    schedule = PrefixSchedule(PrefixConfig(min_gain=0, cp_reduce=reduce, **options))
    found = []
    with recorded(found, gives):
        align.run_step(schedule, chunks, items)
    ranks = parallel_state.get_context_parallel_group().group_name
    seen = collections.Counter((kind, *what) for group, kind, *what in found if group == ranks)
    forest, program = schedule.report.forest, schedule.report.plan.actions_of(0, 0)
    together = max(len({*numbers}) for numbers in trees(forest.segments))
    assert (together > 1) == (options == PACKED)
    assert any(segment.inner and segment.scored for segment in forest.segments)
    num_local = sum(item["tokens"].numel() for item in items)
    width = model.num_query_groups * model.kv_channels
    expected = expected_traffic(
        forest, program, model.num_layers, width, recompute == "full", reduce, num_local
    )
    return seen, expected


CHUNKED = {"chunk_tokens": 16, "segment_tokens": 48}
PACKED: dict[str, int] = {}  # both trees in a segment a level


@pytest.mark.parametrize(("recompute", "reduce", "options"), [
    ("none", "segment", CHUNKED), ("full", "wave", PACKED),
])  # fmt: skip
def test_only_keys_values_and_their_gradients_cross_ranks(recompute, reduce, options):
    for seen, expected in run_ranks(2, traffic, recompute, reduce, options):
        assert seen == expected
