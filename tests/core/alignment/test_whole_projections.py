"""MLA's projections down as Megatron marks transformer-engine's: cut, which they are not."""

from __future__ import annotations

from typing import Any

from megatron.core.post_training.modelopt.layers import Linear

from megatron_prefix.lab.cli.main import main
from megatron_prefix.lab.runtime.launch import run_ranks
from tests.harness.command_line import BUNDLED

OPTIONS = "--groups 2 --max-tokens 64 --min-gain 4 --dtype float64 --model tiny-deepseek"
LAYOUT = "--set num_moe_experts=none --tp 2 --sequence-parallel"
MARKS = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}


def aligned(*options: str) -> int:
    """One rank's exit code. Its class is changed in place: other modules hold it by name."""
    make = Linear.__init__

    def marked(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        vars(self.weight).update(MARKS)

    Linear.__init__ = marked
    try:
        return main(["align", *options])
    finally:
        Linear.__init__ = make


def test_both_schedules_agree_with_them() -> None:
    options = ["--rollouts", BUNDLED, *OPTIONS.split(), *LAYOUT.split()]
    assert run_ranks(aligned, 2, options) == [0, 0]
