"""Small models with DeepSeek's sparse attention in fp64, and the rotation that stock has no CPU
kernel for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.cases import DSA
from tests.harness.one_rank import small_model

DENSE: dict[str, Any] = {"num_layers": 2, "num_moe_experts": None}


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
