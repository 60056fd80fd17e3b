"""MLA's projections down as Megatron marks transformer-engine's: cut, which they are not."""

from __future__ import annotations

from typing import Any

from megatron.core.post_training.modelopt import layers

from megatron_prefix.lab.cli.main import main
from megatron_prefix.lab.runtime.launch import run_ranks
from tests.harness.command_line import BUNDLED

OPTIONS = "--groups 2 --max-tokens 64 --min-gain 4 --dtype float64 --model tiny-deepseek"
LAYOUT = "--set num_moe_experts=none --tp 2 --sequence-parallel"
Linear = layers.Linear


class Marked(Linear):  # type: ignore[misc]
    """Whole on every tensor-parallel rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        marks = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}
        for name, value in marks.items():
            setattr(self.weight, name, value)


def aligned(*options: str) -> int:
    """One rank's exit code."""
    layers.Linear = Marked
    return main(["align", *options])


def test_both_schedules_agree_with_them() -> None:
    options = ["--rollouts", BUNDLED, *OPTIONS.split(), *LAYOUT.split()]
    assert run_ranks(aligned, 2, options) == [0, 0]
