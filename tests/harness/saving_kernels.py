"""Stand-ins for the kernels of recurrent layers that save for backward what the CUDA ones save.

They compute nothing: outputs and gradients are zeros. Megatron's modules around them run as they
are, so what those save can be measured on the CPU; what the kernels save is read from their sources
(flash-linear-attention 0.4.2, causal-conv1d 1.5, mamba-ssm 2.2).
"""

import torch
from torch import Tensor
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
            patch.setitem(names, "mamba_split_conv1d_scan_combined", _Scan.call)
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
        patch.setattr(module, "gated_delta_rule", _Rule.call)


def saving_input(x):
    """A norm that saves its input, as those of transformer-engine and mamba-ssm."""
    return Norm.apply(x, False)


class _Saving(Function):
    """Saves tensors; its gradients are zeros."""

    @staticmethod
    def backward(ctx, *_):
        ctx.saved_tensors  # noqa: B018  # as a kernel needs them
        return tuple(
            torch.zeros(shape, dtype=dtype) if needed else None
            for needed, (shape, dtype) in zip(ctx.needs_input_grad, ctx.like, strict=True)
        )

    @staticmethod
    def remember(ctx, given, *saved):
        ctx.like = [(x.shape, x.dtype) if isinstance(x, Tensor) else (None, None) for x in given]
        ctx.save_for_backward(*saved)


class _Convolution(_Saving):
    """`CausalConv1dFn` of causal-conv1d: its input."""

    @staticmethod
    def forward(ctx, x, weight):
        _Saving.remember(ctx, (x, weight), x, weight)
        return torch.zeros_like(x)

    @classmethod
    def call(cls, x, weight, **_):
        return cls.apply(x, weight)


class Norm(_Saving):
    """`L2NormFunction` of flash-linear-attention saves its output, `LayerNormFn` of
    mamba-ssm its input; and both a number a head or group."""

    @staticmethod
    def forward(ctx, x, output):
        out = torch.zeros_like(x)
        scale = x.new_zeros(x.shape[:-1], dtype=torch.float32)
        _Saving.remember(ctx, (x, output), out if output else x, scale)
        return out

    @classmethod
    def call(cls, x):
        return cls.apply(x, True)


class _Rule(_Saving):
    """`ChunkGatedDeltaRuleFunction` of flash-linear-attention: its inputs, g summed up
    within chunks in their place, and A."""

    @staticmethod
    def forward(
        ctx, q, k, v, g, beta, state,
        num,
    ):  # fmt: skip
        products = k.new_zeros(*k.shape[:3], CHUNK)
        given = q, k, v, g, beta, state, num
        _Saving.remember(ctx, given, q, k, v, torch.zeros_like(g), beta, products, state)
        final = torch.zeros(num, k.shape[2], k.shape[3], v.shape[3])
        return torch.zeros_like(v), final

    @classmethod
    def call(
        cls, q, k, v, g, beta, initial_state,
        cu_seqlens, **_,
    ):  # fmt: skip
        return cls.apply(q, k, v, g, beta, initial_state, len(cu_seqlens) - 1)


_DELTA = {
    "causal_conv1d_fn": _Convolution.call,
    "causal_conv1d": lambda **given: (_Convolution.call(**given), None),
    "l2norm": Norm.call,
    "chunk_gated_delta_rule": _Rule.call,
}


class _Scan(_Saving):
    """`MambaSplitConv1dScanCombinedFn` of mamba-ssm: its input, the
    states that rows begin with, and what the gate multiplies."""

    @staticmethod
    def forward(ctx, zxbcdt, heads, dim, width, state):
        out = zxbcdt.new_zeros(*zxbcdt.shape[:2], len(heads) * dim)
        given = zxbcdt, heads, dim, width, state
        _Saving.remember(ctx, given, zxbcdt, heads, torch.zeros_like(out), state)
        return out, torch.zeros(len(zxbcdt), len(heads), dim, width)

    @classmethod
    def call(
        cls, zxbcdt, conv1d_weight, conv1d_bias, dt_bias, *_,
        D, ngroups, headdim = None, initial_states = None,  # noqa: N803
        return_final_states = False, **__,
    ):  # fmt: skip
        dim = headdim or D.shape[1]
        width = (len(conv1d_weight) - len(dt_bias) * dim) // 2 // ngroups
        found = cls.apply(zxbcdt, dt_bias, dim, width, initial_states)
        return found if return_final_states else found[0]
