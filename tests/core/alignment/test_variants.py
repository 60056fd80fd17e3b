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
from megatron_prefix.lab.models.presets import RopeScaling
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


OPTIONS: dict[str, dict[str, Any]] = {
    "softmax_scale": dict(softmax_scale=0.3),
    "a whole softmax_scale": dict(softmax_scale=1),
    "apply_query_key_layer_scaling": dict(apply_query_key_layer_scaling=True),
    "both scales": dict(softmax_scale=0.4, apply_query_key_layer_scaling=True),
    "no_rope_freq": dict(no_rope_freq=[0, 1]),
    "rotary_interleaved": dict(rotary_interleaved=True),
    "qk_l2_norm": dict(qk_l2_norm=True),
    "residual after the norm": dict(apply_residual_connection_post_layernorm=True),
    "biases": dict(add_bias_linear=True, add_qkv_bias=True),
    "recompute a layer at a time": dict(
        recompute_granularity="full", recompute_method="block", recompute_num_layers=1
    ),
    "recompute two layers together": dict(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2
    ),
    "recompute attention and MLP": dict(
        recompute_granularity="selective", recompute_modules=["core_attn", "mlp", "layernorm"]
    ),
}


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


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_config(name: str) -> None:
    check(dict(config_overrides=OPTIONS[name]))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("qk_layernorm", [False, True])
def test_shapes_of_the_families(tied: bool, qk_layernorm: bool) -> None:
    spec = dict(tie_embeddings=tied, qk_layernorm=qk_layernorm, num_query_groups=4, num_layers=3)
    check(dict(spec=spec))


def test_scaled_rotary_embedding() -> None:
    check(dict(spec=dict(rope_scaling=RopeScaling(8.0), rotary_base=500000.0)))


@pytest.mark.parametrize("kind", ["learned_absolute", "none"])
def test_other_positions(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that the presets do not make, but users have."""
    from megatron.core.models.gpt import gpt_model

    class Model(gpt_model.GPTModel):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "position_embedding_type": kind})

    monkeypatch.setattr(gpt_model, "GPTModel", Model)
    check(dict(spec=dict(max_position=64)))
