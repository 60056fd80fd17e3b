"""Options of the model that reach attention or positions, against plain autograd in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_prefix.config import MEMORY_POLICIES, PrefixConfig
from megatron_prefix.lab.models.build import unwrap
from megatron_prefix.layers.blocks.interface import Partial, Runs
from megatron_prefix.layers.blocks.operators import MathKernel
from megatron_prefix.run.schedule import PrefixSchedule
from megatron_prefix.tree import Pairs, payload_map
from tests.harness import steps
from tests.harness.one_rank import one_rank, small_model
from tests.harness.steps import Contract, Microbatch

pytestmark = pytest.mark.turns


@pytest.fixture(scope="module", autouse=True)
def _rank() -> Iterator[None]:
    with one_rank():
        yield


def items() -> list[Microbatch]:
    """Rollouts on three levels, with loss in the middle one."""
    draw = np.random.default_rng(2)
    prompt, turn = draw.integers(0, 60, 15), draw.integers(0, 60, 9)
    found = []
    for uid, start in enumerate((np.r_[prompt, turn], np.r_[prompt, turn], prompt)):
        tokens = np.r_[start, draw.integers(0, 60, 5)]
        pairs = Pairs(tokens[:-1], tokens[1:], np.arange(len(tokens) - 1) >= 14)
        found.append(steps.microbatch([pairs], 0, uid))
    return found


def check(options: dict[str, Any], name: str = "tiny-llama") -> None:
    model, twin = (small_model(name, wrap_ddp=ddp, **options) for ddp in (True, False))
    for chunk in (model, twin):
        chunk_parameters = dict(unwrap(chunk).named_parameters())
        generator = torch.Generator().manual_seed(5)
        for parameter in chunk_parameters.values():  # biases are zero otherwise
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data += 0.05 * noise
    wanted = steps.plain(twin, Contract(), items())
    config = PrefixConfig(min_gain=0, chunk_tokens=6, kernel="math")
    for memory in MEMORY_POLICIES:
        steps.zero_gradients(model)
        schedule = PrefixSchedule(PrefixConfig(**{**vars(config), "memory": memory}))
        steps.call(schedule, Contract().step, model, items())
        steps.assert_gradients(steps.gradients(model), wanted, 100)


def test_long_blocks_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_map, "PIECE_KEYS", 4)
    keys: list[int] = []
    forward = MathKernel.forward

    def counted(
        self: MathKernel, q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float
    ) -> Partial:
        if not runs.causal:
            keys.append(len(k))
        return forward(self, q, k, v, runs, scale)

    check({})  # the kernels are probed with longer blocks before the first step
    monkeypatch.setattr(MathKernel, "forward", counted)
    check({})
    assert max(keys) == 4 and min(keys) < 4
