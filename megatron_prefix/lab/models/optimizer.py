"""Megatron's optimizer over model chunks."""

from __future__ import annotations

from typing import Any

import torch

from megatron_prefix.errors import UserError


def build_optimizer(
    chunks: list[Any],
    *,
    lr: float = 1e-6,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    clip_grad: float = 1.0,
) -> Any:
    """Megatron's AdamW for these model chunks.

    bfloat16 parameters get float32 main parameters. float32 and float64 parameters are updated
    directly from their `main_grad` of the same dtype, so a float64 step is float64 throughout.
    `build_model` decides about the distributed optimizer.

    Args:
        clip_grad: the largest norm of the whole gradient; 0 does not clip. Megatron's clipping
            takes float32 gradients only (optimizer/clip_grads.py, `clip_grad_by_total_norm_fp32`).

    Raises:
        UserError: chunks without DDP, or float64 with clipping or the distributed optimizer.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.utils import get_model_config

    if not hasattr(chunks[0], "ddp_config"):
        raise UserError("an optimizer needs chunks built with wrap_ddp=True")
    distributed = chunks[0].ddp_config.use_distributed_optimizer
    model_config = get_model_config(chunks[0])
    dtype = model_config.params_dtype
    if dtype == torch.float64 and (clip_grad > 0 or distributed):
        raise UserError(
            f"float64 with clip_grad {clip_grad} and distributed optimizer {distributed}: "
            "Megatron clips and shards no float64; use clip_grad 0 and no distributed optimizer"
        )
    config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        min_lr=lr,
        weight_decay=weight_decay,
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        adam_eps=eps,
        clip_grad=clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    optimizer = get_megatron_optimizer(config, chunks)
    model_config.grad_scale_func = optimizer.scale_loss
    return optimizer
