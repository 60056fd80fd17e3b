"""Megatron-LM's own training loop through `megatron_prefix.run`: stock against prefix. The loop is
that of the wheel, and pretrain_script.py as much of pretrain_gpt.py as is needed here."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks.trainers.trajectories import distance
from megatron_prefix.lab.numerics import tolerance
from tests.core.trainers.registry import newer, printed

SCRIPT = Path(__file__).with_name("pretrain_script.py")
LAYOUTS = ("pp2-dp2", "tp2-pp2-packed", "tp2-pp2-mtp")
"""With "mtp" the model has a layer of multi-token prediction, whose loss counts as much as its own.
"""
NUM_STEPS = 2
"""A wrong gradient shows in the second step."""
RUNS = [f"{layout} {mode} {NUM_STEPS}" for layout in LAYOUTS for mode in ("stock", "on")]
RUNS.append(f"{LAYOUTS[0]} off {NUM_STEPS}")
TOKENS = 8 * 64
"""Of a step."""


@pytest.fixture(scope="module")
def runs():
    """Per run and rank what every step gave, and at the end a digest of the parameters."""
    words = "tests.core.trainers.pretrain_steps", str(SCRIPT), *RUNS
    lines = printed(len(RUNS), *words, PYTHONPATH=newer())
    assert [line["run"] for line in lines] == RUNS
    assert not any(line["error"] for line in lines), [line["error"] for line in lines]
    return {line["run"].rpartition(" ")[0]: line["ranks"] for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_the_stock_schedules(runs, layout):
    for ours, theirs in zip(runs[f"{layout} on"], runs[f"{layout} stock"], strict=True):
        assert len(theirs) == NUM_STEPS + 1, "steps and the digest"
        assert max(distance(ours[:-1], theirs[:-1])) <= tolerance(torch.float32, TOKENS)
        assert all(step["active"] and step["executed"] < 0.7 * step["raw"] for step in ours[:-1])


@pytest.mark.slow
def test_off_is_bitwise_stock(runs):
    off, stock = (runs[f"{LAYOUTS[0]} {mode}"] for mode in ("off", "stock"))
    assert off == stock
    assert off[0][-1]["parameters"] != off[-1][-1]["parameters"], "of another stage"


def test_a_difference_and_a_nan_are_seen():
    step = {"losses": {"lm loss": 4.0}, "grad_norm": 2.0}
    assert distance([step], [step]) == (0, 0)
    assert distance([{**step, "grad_norm": 2.002}], [step]) == (0, pytest.approx(1e-3))
    assert distance([{**step, "losses": {"lm loss": math.nan}}], [step]) == (math.inf, 0)
    assert distance([{**step, "losses": {}}], [step]) == (math.inf, math.inf)
