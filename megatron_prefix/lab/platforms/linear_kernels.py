"""Kernels of recurrent layers in plain torch, with the names and signatures of the CUDA ones.

GatedDeltaNet calls flash-linear-attention and causal-conv1d, Mamba calls mamba-ssm: CUDA and Triton
only. These compute the same on any device, in any dtype, and differentiate by autograd. As theirs
do, they compute 16 bit in fp32: outputs are in the inputs' dtype, states in fp32. They run as
matrix products over chunks of `CHUNK` positions ("Gated Delta Networks", section 3.3; "Transformers
are SSMs", section 6). They are for references, tests and small models, not fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_prefix.features.recurrent.definition import CHUNK, decays, wide


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Depthwise convolution of every channel with its past, as causal-conv1d's.

    Args:
        x: [batch, channels, positions].
        weight: [channels, width].
        bias: [channels].
        seq_idx, initial_states, return_final_states, final_states_out: not supported here.
        activation: None, "silu" or "swish".
    """
    if seq_idx is not None or initial_states is not None or return_final_states:
        raise NotImplementedError("the convolution on the CPU has no states and no seq_idx")
    padded = F.pad(wide(x), (weight.shape[1] - 1, 0))
    bias = None if bias is None else wide(bias)
    y = F.conv1d(padded, wide(weight)[:, None], bias, groups=x.shape[1])
    return (F.silu(y) if activation else y).to(x.dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The same with flash-linear-attention's signature.

    Args:
        x: [batch, positions, channels].
        weight, bias, activation: as above.
        initial_state, output_final_state: not supported here.
        cu_seqlens: where sequences begin and end, with batch 1; else each row is one.
    """
    if initial_state is not None or output_final_state:
        raise NotImplementedError("the convolution on the CPU has no states")
    channels = x.transpose(1, 2)
    lengths = [x.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    parts = channels.split(lengths, 2)
    y = torch.cat([causal_conv1d_fn(p, weight, bias, activation=activation) for p in parts], 2)
    return y.transpose(1, 2), None


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,  # noqa: N803
    D: Tensor,  # noqa: N803
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    return_final_states: bool = False,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    **_: Any,
) -> Any:
    """Mamba2's convolution, scan and gate, as mamba-ssm's; without its norm.

    For every head S = exp(dt A) S + dt x B'; out = (S C + D x) silu(z).

    Args:
        zxbcdt: z, x, B, C and dt side by side, [batch, positions, width].
        conv1d_weight: [channels of x, B and C, width].
        conv1d_bias: [channels].
        dt_bias, A: [heads].
        D: [heads] or [heads, headdim].
        chunk_size: of the CUDA kernel.
        initial_states: [batch, heads, headdim, state].
        seq_idx: not supported here.
        return_final_states: whether to return the states at the ends, too.
        activation: of the convolution.
        headdim: needed where D is [heads].
        ngroups: of B and C.
        norm_before_gate: of the norm, which is not here.

    Returns:
        The output in `zxbcdt`'s dtype, and the states in fp32 or wider if they are asked for.
    """
    if seq_idx is not None:
        raise NotImplementedError("the scan on the CPU has no seq_idx")
    dtype = zxbcdt.dtype
    heads, dim = len(dt_bias), D.shape[1] if headdim is None else headdim
    inner, channels = heads * dim, conv1d_weight.shape[0]
    z, xbc, dt = wide(zxbcdt).split([inner, channels, heads], -1)
    xbc = causal_conv1d_fn(xbc.mT, conv1d_weight, conv1d_bias, activation=activation).mT
    x, b, c = xbc.split([inner, (channels - inner) // 2, (channels - inner) // 2], -1)
    x = x.unflatten(-1, (heads, dim))
    b, c = (u.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2) for u in (b, c))
    dt = F.softplus(dt + dt_bias)
    shape = (len(x), heads, dim, b.shape[-1])
    state = x.new_zeros(shape) if initial_states is None else wide(initial_states)
    outs = []
    for at in range(0, x.shape[1], CHUNK):
        part = [u[:, at : at + CHUNK].transpose(1, 2) for u in (x, b, c, dt)]
        out, state = _scan_chunk(part, A, state)
        outs.append(out)
    y = torch.cat(outs, 2).transpose(1, 2) + (D[:, None] if D.dim() == 1 else D) * x
    y = (y.flatten(2) * F.silu(z)).to(dtype)
    return (y, state) if return_final_states else y


def _scan_chunk(parts: Sequence[Tensor], decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of x, b and c [batch, heads, positions, ...] and dt [batch, heads, positions]."""
    x, b, c, dt = parts
    total = (dt * decay[:, None]).cumsum(-1)
    value = dt[..., None] * x
    out = ((c @ b.mT) * decays(total)) @ value + total[..., None].exp() * (c @ state.mT)
    rest = (total[..., -1:] - total).exp()[..., None]
    return out, total[..., -1:, None].exp() * state + (value * rest).mT @ b


class RMSNorm(nn.Module):
    """RMSNorm of groups of channels, built as mamba-ssm's gated one; the gate is not used.

    Args:
        hidden_size: channels.
        eps: added to the mean square.
        group_size: channels of a group.
        norm_before_gate: whether the gate comes last.
        device, dtype: of the weight.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps, self.group_size = eps, group_size or hidden_size

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """[..., hidden_size], normalised group by group."""
        if z is not None:
            raise NotImplementedError("the norm on the CPU has no gate")
        groups = wide(x).unflatten(-1, (-1, self.group_size))
        scaled = groups * (groups.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (scaled.flatten(-2) * self.weight).to(x.dtype)
