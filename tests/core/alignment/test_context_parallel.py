"""Which context-parallel ranks decide together; steps are rows of tests/test_cases_on_ranks.py."""

import contextlib
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.cli.main import main
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify import align
from megatron_prefix.run.execute.memory_control import MemoryControl
from megatron_prefix.run.schedule import PrefixSchedule
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
