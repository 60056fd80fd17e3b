"""`bench`: both schedules are timed in the same way."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from megatron_prefix.bench import steps
from megatron_prefix.config import PrefixConfig
from megatron_prefix.models.presets import resolve
from megatron_prefix.rl import passes
from tests.harness.one_rank import one_rank, small_model


def test_both_schedules_are_warmed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[Any] = Counter()
    run = passes.run

    def counted(schedule: Any, *arguments: Any) -> Any:
        calls[type(schedule).__name__] += 1
        return run(schedule, *arguments)

    monkeypatch.setattr(passes, "run", counted)
    shape, spec = steps.GroupShape(24, 8, 3), resolve("tiny-llama", num_layers=1).with_vocab(64)
    with one_rank():
        chunks = [small_model(vocab=64, spec=dict(num_layers=1), dtype=torch.float32)]
        timing = steps.time_groups(
            "shape", [shape.group(64, 1)], spec, chunks, PrefixConfig(min_gain=0), repeats=2,
            seed=1, stock_times={},
        )  # fmt: skip
    assert timing.executed_tokens < timing.raw_tokens
    assert list(calls.values()) == [steps.WARM_UP + 2] * 2
