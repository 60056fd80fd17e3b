"""Small models with DeepSeek's sparse attention in fp64, and the rotation that stock has no CPU
kernel for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.harness import hybrid, steps
from tests.harness.one_group import schedule_with
from tests.harness.one_rank import small_model

DENSE: dict[str, Any] = {"num_layers": 2, "num_moe_experts": None}
DSA: dict[str, Any] = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 16,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": 6,
    "dsa_indexer_loss_coeff": 0.0,
}
"""Fields of Megatron's config. With so many heads no score is zero: ties have no place here."""


def rotated(x: Tensor) -> Tensor:
    """The Hadamard transform of the last dimension, a power of two, as an orthogonal matrix."""
    matrix = torch.ones(1, 1, dtype=x.dtype)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return x @ (matrix * x.shape[-1] ** -0.5)


@contextlib.contextmanager
def rotating() -> Iterator[None]:
    """For a while Megatron's indexers have it, whatever the dtype."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    with mock.patch.object(dsa, "rotate_activation", rotated):
        yield


def model_of(fields: dict[str, Any], **options: Any) -> Any:
    """Equal arguments give equal weights.

    Args:
        fields: of Megatron's config, besides DSA.
        options: see `small_model`.
    """
    spec = {**DENSE, **options.pop("spec", {})}
    overrides = {**DSA, **fields}
    return small_model("tiny-deepseek", spec=spec, config_overrides=overrides, **options)


def worst(model: Any, expected: steps.Reference, **fields: Any) -> float:
    """As `hybrid.worst`; an indexer's weights have no gradient but zeros, in either schedule."""
    rest, own = {}, {}
    for name, gradient in expected.gradients.items():
        (own if ".indexer." in name else rest)[name] = gradient
    assert own and not any(gradient.any() for gradient in own.values())
    found = _gradients(model, **fields)
    assert found[0].keys() == expected.gradients.keys()
    assert not any(found[0][name].any() for name in own)
    pairs = zip(found[1], expected.logs, strict=True)
    losses = [float(abs(ours["loss"] - theirs["loss"])) for ours, theirs in pairs]
    errors = [
        float((found[0][name] - wanted).abs().max()) / expected.terms[name]
        for name, wanted in rest.items()
    ]
    return torch.tensor([*losses, *errors], dtype=torch.float64).max().item()


def _gradients(model: Any, **fields: Any) -> tuple[dict[str, Tensor], list[Any]]:
    steps.zero_gradients(model)
    logs = steps.call(schedule_with(**fields), steps.Contract().step, model, hybrid.items())
    return steps.gradients(model), logs
