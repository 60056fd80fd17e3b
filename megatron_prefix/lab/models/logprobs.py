"""Log-probabilities of given tokens, over a vocabulary split by tensor parallelism.

Megatron-Core's cross entropy always computes in float32 (tensor_parallel/cross_entropy.py,
`calculate_logits_max`). This one keeps float64, as alignment in float64 needs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


def vocab_parallel_log_probs(
    logits: torch.Tensor, labels: torch.Tensor, tp_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """log softmax(logits)[label], without gathering the vocabulary.

    Ranks exchange three numbers a token in two all-reduces: the largest logit, the sum of
    exponentials and the label's logit. This rank's softmax is the only tensor of the logits' size;
    it is kept for the backward.

    Args:
        logits: [s, b, V/tp], this rank's contiguous part of the vocabulary, parts ordered by rank.
        labels: [b, s], token ids of the whole vocabulary, the same on every rank of the group.
        tp_group: the tensor-parallel group; None or a group of one for a whole vocabulary.

    Returns:
        [b, s], in float32, or in float64 for float64 logits; the same on every rank.
    """
    if logits.shape[:2] != labels.shape[::-1]:
        raise ValueError(
            f"logits [s, b, V/tp] {tuple(logits.shape)} do not match labels [b, s] "
            f"{tuple(labels.shape)}"
        )
    return _VocabParallelLogProbs.apply(logits, labels.t(), tp_group).t()


class _VocabParallelLogProbs(torch.autograd.Function):
    """d log p(label) / d logits = onehot(label) - softmax(logits)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        """[s, b, V/tp], [s, b] -> [s, b]."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        size = 1 if group is None else group.size()
        first = 0 if group is None else group.rank() * logits.shape[-1]

        largest = logits.amax(dim=-1).to(dtype)
        if size > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        # Always a new tensor: the softmax is computed in place.
        softmax = logits.to(dtype) - largest.unsqueeze(-1)

        local = labels - first
        here = (local >= 0) & (local < logits.shape[-1])
        index = local.where(here, torch.zeros_like(local)).unsqueeze(-1)
        of_label = softmax.gather(-1, index).squeeze(-1) * here
        sums = torch.stack([softmax.exp_().sum(dim=-1), of_label])
        if size > 1:
            dist.all_reduce(sums, group=group)
        softmax.div_(sums[0].unsqueeze(-1))

        ctx.save_for_backward(softmax, index, here)
        ctx.dtype = logits.dtype
        return sums[1] - sums[0].log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """[s, b] -> [s, b, V/tp], in one buffer of the logits' own dtype.

        The label's entry is computed as grad * (1 - p) and written over, not added to -grad * p:
        in bfloat16 the sum of two rounded numbers would lose it where p is near 1.
        """
        softmax, index, here = ctx.saved_tensors
        at_label = here.to(softmax.dtype) - softmax.gather(-1, index).squeeze(-1)
        gradient = torch.empty_like(softmax, dtype=ctx.dtype)
        torch.mul(softmax, grad.neg().unsqueeze(-1), out=gradient)
        gradient.scatter_(-1, index, (grad * at_label).unsqueeze(-1).to(ctx.dtype))
        return gradient, None, None
