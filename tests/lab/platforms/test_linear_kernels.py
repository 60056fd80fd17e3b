"""Recurrent kernels for the CPU against their definitions, position by position."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from megatron_prefix.errors import UserError
from megatron_prefix.features.recurrent.definition import chunk_gated_delta_rule
from megatron_prefix.lab.platforms import cpu, linear_kernels
from megatron_prefix.lab.platforms.linear_kernels import CHUNK, mamba_split_conv1d_scan_combined


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def delta(state, q, k, v, g, beta):
    """One sequence, [positions, heads, ...]."""
    out = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        wrong = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t, :, None]
        state = state + k[t, :, :, None] * wrong[:, None]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]) * q.shape[-1] ** -0.5)
    return torch.stack(out), state


@pytest.mark.parametrize("bounds", [(0, 3, 2 * CHUNK + 6, 2 * CHUNK + 7), (0, CHUNK)])
def test_the_gated_delta_rule(bounds):
    length, heads = bounds[-1], 3
    q, k, v = (random(1, length, heads, width) for width in (4, 4, 5))
    k, g, beta = (
        F.normalize(k, dim=-1), -random(1, length, heads).abs() / 10, random(1, length, heads),
    )  # fmt: skip
    states = random(len(bounds) - 1, heads, 4, 5)
    given = dict(g=g, beta=beta, initial_state=states, cu_seqlens=torch.tensor(bounds))
    out, finals = chunk_gated_delta_rule(q, k, v, output_final_state=True, **given)
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        parts = (x[0, start:stop] for x in (q, k, v, g, beta))
        wanted, final = delta(states[number], *parts)
        torch.testing.assert_close(out[0, start:stop], wanted)
        torch.testing.assert_close(finals[number], final)
    assert chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[1] is None


def test_the_scan_of_mamba():
    heads, dim, num, groups, length = 4, 3, 5, 2, CHUNK + 9
    inner, channels = heads * dim, heads * dim + 2 * groups * num
    zxbcdt = random(2, length, 2 * inner + 2 * groups * num + heads)
    weight, bias, dt_bias = random(channels, 4), random(channels), random(heads)
    decay, skip, state = -random(heads).abs(), random(heads), random(2, heads, dim, num)
    found, final = mamba_split_conv1d_scan_combined(
        zxbcdt, weight, bias, dt_bias, decay, D=skip, chunk_size=8, initial_states=state,
        return_final_states=True, headdim=dim, ngroups=groups,
    )  # fmt: skip
    z, xbc, dt = zxbcdt.split([inner, channels, heads], -1)
    padded = F.pad(xbc, (0, 0, 3, 0))
    xbc = F.silu(sum(padded[:, i : i + length] * weight[:, i] for i in range(4)) + bias)
    x, b, c = xbc.split([inner, groups * num, groups * num], -1)
    step = F.softplus(dt + dt_bias)
    for t in range(length):
        here = x[:, t].unflatten(1, (heads, dim))
        b_t, c_t = (u[:, t].unflatten(1, (groups, num))[:, [0, 0, 1, 1]] for u in (b, c))
        state = (step[:, t] * decay).exp()[..., None, None] * state
        state = state + step[:, t, :, None, None] * here[..., None] * b_t[:, :, None]
        out = (state * c_t[:, :, None]).sum(-1) + skip[:, None] * here
        torch.testing.assert_close(found[:, t], out.flatten(1) * F.silu(z[:, t]))
    torch.testing.assert_close(final, state)


def test_a_convolution_of_a_pack_is_that_of_its_sequences():
    x, weight = random(1, 12, 5), random(5, 4)
    ends = torch.tensor([0, 2, 9, 12], dtype=torch.int32)
    convolve = linear_kernels.causal_conv1d
    found, _ = convolve(x, weight, activation="silu", cu_seqlens=ends)
    parts = [convolve(part, weight, activation="silu")[0] for part in x.split([2, 7, 3], 1)]
    torch.testing.assert_close(found, torch.cat(parts, 1))
    with pytest.raises(NotImplementedError, match="no states"):
        convolve(x, weight, initial_state=random(1, 5, 3))


def test_the_norm_is_of_groups():
    norm = linear_kernels.RMSNorm(6, eps=0.0, group_size=3, dtype=torch.float64)
    found = norm(random(4, 6)).detach().unflatten(1, (2, 3)).square().mean(-1)
    torch.testing.assert_close(found, torch.ones_like(found))


def test_stand_ins_last_for_the_import_which_needs_them(monkeypatch):
    import sys

    cpu.enable(hide_gpus=True)
    cpu.load_recurrent_layers()
    names = {name.partition(".")[0] for name in sys.modules}
    assert not names & {"fla", "causal_conv1d", "mamba_ssm"}
    mixer = sys.modules["megatron.core.ssm.mamba_mixer"]
    cpu.load_recurrent_layers()
    assert sys.modules["megatron.core.ssm.mamba_mixer"] is mixer
    monkeypatch.delattr(mixer, "_on_cpu")
    monkeypatch.setattr(mixer, "HAVE_MAMBA_SSM", False)
    with pytest.raises(UserError, match="imported without mamba-ssm"):
        cpu.load_recurrent_layers()
