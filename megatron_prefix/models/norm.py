"""RMSNorm for Megatron's local layer spec."""

from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, built as Megatron builds its norms.

    Megatron's own wrapper of it refuses sequence parallelism (transformer/torch_norm.py:32). All
    that takes is a mark on the weight: each rank has seen only its part of the sequence, so
    `finalize_model_grads` must sum the weight's gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
