"""Hybrid models on a GPU, with flash-linear-attention's kernels."""

import dataclasses

import pytest
import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.run.execute.executor import Executor
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness.calls import ROWS, VOCAB, Trainer, run_step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_one_gpu")]


@pytest.mark.parametrize("layers", ["local", "te"])
def test_no_action_of_a_step_waits_for_the_device(layers, monkeypatch):
    """Roots, chunks and waves, forward and backward; the first step compiles.

    With the rule's real widths, whose kernels others need as well (benchmarks/compile_fla.py).
    """
    pytest.importorskip("fla")
    if layers == "te":  # with its cross entropy, too
        pytest.importorskip("transformer_engine.pytorch")
    spec = resolve("qwen3.5-9b", num_layers=4, hidden_size=256, ffn_hidden_size=256)
    spec = dataclasses.replace(spec, vocab_size=None).with_vocab(VOCAB)
    chunks = build_model(spec, dtype="bfloat16", device="cuda", layer_spec=layers)
    schedule = PrefixSchedule(PrefixConfig(min_gain=0, segment_tokens=64, chunk_tokens=16))
    stock, steps = Executor.run, []

    def watched(self, *given):
        steps.append(given)
        torch.cuda.set_sync_debug_mode("error" if len(steps) > 1 else "default")
        try:
            stock(self, *given)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Executor, "run", watched)
    for _ in range(2):
        run_step(schedule, Trainer(ROWS, 0, Layout(), "cuda"), chunks)
    assert len(steps) == 2
    assert schedule.report is not None and schedule.report.decision.share
