"""The memory model of experts on tensor-parallel ranks, against bytes that autograd holds there."""

import functools

import pytest
import torch
from megatron.core import parallel_state

from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.runtime import Layout
from tests.harness.ranks import check_cases
from tests.lab.predict.test_peak_memory import SHAPES, VOCAB, ratio_of

CASES = {
    "many copies": ({"hidden_size": 256, "moe_router_topk": 4}, {}),
    "a gathered input of shared ones": (
        {"moe_shared_expert_intermediate_size": 8, "hidden_size": 256, "moe_router_topk": 1},
        {"moe_shared_expert_overlap": True, "moe_router_pre_softmax": True},
    ),
}


@pytest.mark.parametrize("parts", [1, 2])
def test_experts_of_ranks(parts, monkeypatch):
    """Of every expert a rank has all, and gets its own tokens, or a part, and gets all tokens."""
    torch.use_deterministic_algorithms(False)  # with them Megatron adds up what it has saved
    start = functools.partial(
        parallel_state.initialize_model_parallel, expert_tensor_parallel_size=parts
    )
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", start)

    def compare(case, layout):
        spec, config = case
        model = build_model(
            resolve("tiny-moe", num_layers=3, **spec).with_vocab(VOCAB), layout=layout,
            config_overrides={**config, "expert_tensor_parallel_size": parts},
        )[0]  # fmt: skip
        ratio = ratio_of(model, SHAPES[0])
        return "" if 0.9 <= ratio <= 1.1 else f"{ratio:.3f}"

    check_cases(Layout(tp=2, sequence_parallel=True), CASES, compare)
