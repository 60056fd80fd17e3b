"""Modules of Megatron's local layer spec that Megatron limits more than it must."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, built as Megatron builds its norms.

    Megatron's own wrapper of it refuses sequence parallelism (transformer/torch_norm.py:32). All
    that takes is a mark on the weight: each rank has seen only its part of the sequence, so
    `finalize_model_grads` must sum the weight's gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ContextParallelAttention(DotProductAttention):
    """Megatron's local attention where the layout has context parallelism.

    Stock code refuses to build it (transformer/dot_product_attention.py:58), because it cannot see
    the other ranks' keys. The prefix schedule replaces the instance's `forward`; nothing else of
    the module knows of context parallelism. Without that replacement it must not run.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Refuse: the stock schedule has no attention for this layout."""
        raise RuntimeError(
            "Megatron's local attention has no context parallelism: install the prefix schedule, "
            "or use transformer-engine's layers"
        )
