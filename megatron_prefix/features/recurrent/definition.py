"""The gated delta rule in plain torch, with the signature of flash-linear-attention's.

It is what the rule's kernels are compared with (probe.py). It runs as matrix products over chunks
of `CHUNK` positions ("Gated Delta Networks", section 3.3), on any device and in any dtype, and
differentiates by autograd. Like the kernels it computes 16 bit in fp32.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK = 32
"""Positions of one chunk."""


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype that is computed in: fp32, or fp64 where it has that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x` with its last dimension scaled to length 1."""
    values = wide(x)
    return (values * (values.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule, as flash-linear-attention's.

    For every head S = exp(g) S; S = S + beta k (v - S'k)'; out = S'q scale.

    Args:
        q, k: [batch, positions, heads, key_dim].
        v: [batch, positions, heads, value_dim].
        g, beta: [batch, positions, heads].
        initial_state: [sequences, heads, key_dim, value_dim].
        cu_seqlens: where sequences begin and end, with batch 1; else each row is one.
        cu_seqlens_cpu: the same on the host, which is read where it is given.

    Returns:
        The output in `v`'s dtype, and the states in fp32 or wider.
    """
    dtype = v.dtype
    q, k, v, g, beta = map(wide, (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    # [batch, heads, positions, ...]
    parts = [x.transpose(1, 2) for x in (q, k, v, g[..., None], beta[..., None])]
    ends = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    bounds = [0, q.shape[1]] if ends is None else ends.tolist()
    num = len(q) * (len(bounds) - 1)
    if initial_state is None:
        initial_state = q.new_zeros(num, q.shape[2], k.shape[3], v.shape[3])
    states = wide(initial_state).split(len(q))
    outs, finals = [], []
    for (start, stop), state in zip(itertools.pairwise(bounds), states, strict=True):
        for at in range(start, stop, CHUNK):
            part = [x[:, :, at : min(at + CHUNK, stop)] for x in parts]
            out, state = _delta_chunk(part, state)
            outs.append(out)
        finals.append(state)
    out = torch.cat(outs, 2).transpose(1, 2).to(dtype)
    return out, torch.cat(finals) if output_final_state else None


def _delta_chunk(parts: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of q, k, v, g and beta, [batch, heads, positions, ...]: what is written to the
    state solves a triangular system."""
    q, k, v, g, beta = parts
    total = g.cumsum(2)
    decay = decays(total.squeeze(-1))
    system = torch.eye(k.shape[2], dtype=k.dtype, device=k.device) + (
        beta * (k @ k.mT) * decay
    ).tril(-1)
    updates = beta * (v - total.exp() * (k @ state))
    written = torch.linalg.solve_triangular(system, updates, upper=False, unitriangular=True)
    out = total.exp() * (q @ state) + ((q @ k.mT) * decay) @ written
    decay_to_end = (total[:, :, -1:] - total).exp()
    return out, total[:, :, -1:].exp() * state + (k * decay_to_end).mT @ written


def decays(total: Tensor) -> Tensor:
    """exp(total_t - total_s) where s <= t, else 0, [..., t, s], of [..., positions]."""
    difference = total[..., :, None] - total[..., None, :]
    past = torch.ones(difference.shape[-2:], dtype=torch.bool, device=total.device).tril()
    return difference.masked_fill(~past, -torch.inf).exp()
