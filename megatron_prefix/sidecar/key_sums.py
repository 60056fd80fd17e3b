"""Gradients of a rank's own runs of keys, summed where the keys lie in an exchange.

With context parallelism a rank's two runs of a span share their first keys (tree/cp_layout.py), so
a key has up to two gradients, and some have none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_prefix.device.fusion import has_triton
from megatron_prefix.sidecar.arena import Both, Payload, wider


def key_sums(
    gradients: Payload, table: Callable[[str], Tensor], num: int, begin: Tensor | None
) -> Tensor:
    """gK and gV side by side in fp32 or wider, [num, kv_heads, dim + value_dim].

    Args:
        gradients: of the keys and of the values of all runs, [keys of runs, kv_heads, (value_)dim].
        table: places by name: "own", of every run's keys in the result; "own sums", the reverse
            (`cp_layout.own_sums`).
        num: positions of the result.
        begin: what is there already, in the shape of the result, and is changed; None: nothing.
    """
    if has_triton(gradients[0].device.type):
        from megatron_prefix.sidecar.key_sums_triton import key_sums_triton

        return key_sums_triton(gradients, table("own sums"), begin)
    runs = side_by_side(gradients)
    total = runs.new_zeros((num, *runs.shape[1:])) if begin is None else begin
    return total.index_add_(0, table("own"), runs)


def side_by_side(gradients: Payload) -> Tensor:
    """gK and gV in one tensor [positions, kv_heads, dim + value_dim] of fp32 or wider."""
    key_grad, value_grad = gradients
    width = key_grad.shape[-1] + value_grad.shape[-1]
    both = key_grad.new_empty((*key_grad.shape[:-1], width), dtype=wider(key_grad.dtype))
    return torch.cat([key_grad, value_grad], dim=-1, out=both)


def halves(both: Tensor, width: int) -> Both:
    """Keys, of this width, and values that lie side by side; views."""
    return both[..., :width], both[..., width:]
