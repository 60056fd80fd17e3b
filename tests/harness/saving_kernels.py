"""Stand-ins for the kernels of recurrent layers that save for backward what the CUDA ones save.

They compute nothing: outputs and gradients are zeros. Megatron's modules around them run as they
are, so what those save can be measured on the CPU; what the kernels save is read from their sources
(flash-linear-attention 0.4.2, causal-conv1d 1.5, mamba-ssm 2.2).
"""

import torch
from torch.autograd import Function

from megatron_prefix.features.recurrent.kind import CHUNK
from megatron_prefix.lab.platforms import linear_kernels


def install(patch, model):
    """Puts them instead of the CPU's kernels, before hooks are installed on the model."""
    for module in model.modules():
        if type(module).__name__ == "GatedDeltaNet":
            _install_delta(patch, module)
        if type(module).__name__ == "MambaMixer":
            names = type(module)._ssm_training.__globals__
            patch.setitem(names, "mamba_split_conv1d_scan_combined", _scan)
    patch.setattr(linear_kernels.RMSNorm, "forward", lambda _, x: saving_input(x))


def _install_delta(patch, module):
    """Releases differ in the names that they call, and in the modules that have these."""
    for one in type(module).__mro__:
        for method in vars(one).values():
            names = getattr(method, "__globals__", {})
            for name, kernel in _DELTA.items():
                if name in names:
                    patch.setitem(names, name, kernel)
    if hasattr(module, "gated_delta_rule"):  # since 0.18
        patch.setattr(module, "gated_delta_rule", _rule)


def saving_input(x):
    """A norm that saves its input, as those of transformer-engine and mamba-ssm."""
    return _norm(x, saves_output=False)


class _Saving(Function):
    """Gives tensors and saves others; its gradients are zeros."""

    @staticmethod
    def forward(ctx, outputs, saved, *inputs):
        ctx.like = [(x.shape, x.dtype) for x in inputs]
        ctx.save_for_backward(*saved)
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    def backward(ctx, *_):
        ctx.saved_tensors  # noqa: B018  # as a kernel needs them
        pairs = zip(ctx.needs_input_grad[2:], ctx.like, strict=True)
        zeros = (torch.zeros(of[0], dtype=of[1]) if needed else None for needed, of in pairs)
        return None, None, *zeros


def _made(outputs, saved, *inputs):
    return _Saving.apply(outputs, saved, *(x for x in inputs if x is not None))


def _convolution(x, weight, **_):
    """`CausalConv1dFn` of causal-conv1d: its input."""
    return _made((torch.zeros_like(x),), (x, weight), x, weight)


def _norm(x, saves_output=True):
    """`L2NormFunction` of flash-linear-attention saves its output, `LayerNormFn` of mamba-ssm its
    input; and both a number a head or group."""
    out, scale = torch.zeros_like(x), x.new_zeros(x.shape[:-1], dtype=torch.float32)
    return _made((out,), (out if saves_output else x, scale), x)


def _rule(q, k, v, g, beta, initial_state, cu_seqlens, **_):
    """`ChunkGatedDeltaRuleFunction` of flash-linear-attention: its inputs, g summed up within
    chunks in their place, and A."""
    final = torch.zeros(len(cu_seqlens) - 1, *k.shape[2:], v.shape[3])
    products = k.new_zeros(*k.shape[:3], CHUNK)
    saved = q, k, v, torch.zeros_like(g), beta, products, initial_state
    return _made((torch.zeros_like(v), final), saved, q, k, v, g, beta, initial_state)


_DELTA = {
    "causal_conv1d_fn": _convolution,
    "causal_conv1d": lambda **given: (_convolution(**given), None),
    "l2norm": _norm,
    "chunk_gated_delta_rule": _rule,
}


def _scan(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, *_,
    D, ngroups, headdim=None, initial_states=None,  # noqa: N803
    return_final_states=False, **__,
):  # fmt: skip
    """`MambaSplitConv1dScanCombinedFn` of mamba-ssm: its input, the states that rows begin with,
    and what the gate multiplies."""
    heads, dim = len(dt_bias), headdim or D.shape[1]
    width = (len(conv1d_weight) - heads * dim) // 2 // ngroups
    out = zxbcdt.new_zeros(*zxbcdt.shape[:2], heads * dim)
    final = torch.zeros(len(zxbcdt), heads, dim, width)
    saved = zxbcdt, dt_bias, torch.zeros_like(out), initial_states
    found = _made((out, final), saved, zxbcdt, dt_bias, initial_states)
    return found if return_final_states else found[0]
