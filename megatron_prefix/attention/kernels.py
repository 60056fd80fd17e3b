"""Chooses the attention kernel: by name, or by trying what works here.

A name is `math`, `flash_cpu`, `flash` or `cudnn` (megatron_prefix/attention/operators.py), or two
of them: `a+b` takes runs without a mask to `a` and causal runs to `b`. cuDNN is fastest on long
runs but builds a plan, on the host, for every new shape; FlashAttention-2 (`flash`) takes any shape
at once, and unequal runs in one call. `cudnn+flash` needs plans for runs without a mask only.
benchmarks/bench_kernels.py measures them.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from megatron_prefix.attention.adaptive import AdaptiveKernel
from megatron_prefix.attention.interface import Aux, Gradients, Kernel, Partial, Runs
from megatron_prefix.attention.operators import (
    CudnnKernel,
    FlashCpuKernel,
    FlashKernel,
    MathKernel,
)
from megatron_prefix.errors import UserError
from megatron_prefix.numerics import assert_close

__all__ = ["KERNELS", "CompositeKernel", "Kernel", "Partial", "Runs", "available", "choose"]

logger = logging.getLogger(__name__)


class CompositeKernel:
    """Runs without a mask by one kernel, causal runs by another."""

    def __init__(self, dense: Kernel, causal: Kernel) -> None:
        self.name = f"{dense.name}+{causal.name}"
        self._parts = (dense, causal)

    def begin_step(self) -> None:
        """See `Kernel.begin_step`."""
        for part in self._parts:
            part.begin_step()

    def refusal(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """See `Kernel.refusal`."""
        dense, causal = (part.refusal(q, k, v) for part in self._parts)
        return dense or causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float) -> Partial:
        """See `Kernel.forward`."""
        return self._parts[runs.causal].forward(q, k, v, runs, scale)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, aux: Aux,
        runs: Runs, scale: float,
    ) -> Gradients:  # fmt: skip
        """See `Kernel.backward`."""
        kernel = self._parts[runs.causal]
        return kernel.backward(dout, q, k, v, out, lse, aux, runs, scale)


KERNELS: dict[str, Kernel] = {
    kernel.name: kernel for kernel in (MathKernel(), FlashCpuKernel(), FlashKernel(), CudnnKernel())
}
_AUTO = {"cuda": ("cudnn", "flash", "math"), "cpu": ("flash_cpu", "math")}


def available(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int | None = None,
) -> dict[str, str | None]:
    """Every kernel by name, with the reason why it does not work here; None: it works.

    Each kernel runs tiny blocks of each kind, forward and backward, and is compared with `math`
    under the numerics policy; the answer is cached. ``head_dim_v`` is ``head_dim`` if None.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    width_v = head_dim if head_dim_v is None else head_dim_v
    return {name: _probed(name, device, dtype, head_dim, width_v) for name in KERNELS}


def choose(
    name: str,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int | None = None,
    num_layers: int = 1,
) -> Kernel:
    """The kernel called ``name`` (see the table above), or the best one here for "auto".

    "auto" is `math` for fp64 and torch's flash on the CPU; on CUDA cuDNN or FlashAttention-2 by
    shape (megatron_prefix/attention/adaptive.py), or whichever of them works. A kernel that does
    not work here is a UserError that says why and which do. ``num_layers`` is how many attention
    layers will use it.
    """
    reasons = available(device, dtype, head_dim, head_dim_v)
    if name == "auto":
        if reasons["cudnn"] is None and reasons["flash"] is None:
            return AdaptiveKernel(KERNELS["cudnn"], KERNELS["flash"], num_layers)
        return KERNELS[_best(reasons, torch.device(device), dtype)]
    parts = name.split("+")
    working = ", ".join(known for known, reason in reasons.items() if reason is None)
    for part in parts:
        if part not in KERNELS or len(parts) > 2:
            known = ", ".join(KERNELS)
            raise UserError(f"attention kernel {name!r} is not auto, one of {known}, or a+b")
        if reasons[part] is not None:
            raise UserError(
                f"attention kernel {part!r} does not work here: {reasons[part]}; use {working}"
            )
    return KERNELS[parts[0]] if len(parts) == 1 else CompositeKernel(*(KERNELS[p] for p in parts))


def _best(reasons: dict[str, str | None], device: torch.device, dtype: torch.dtype) -> str:
    order = ("math",) if dtype is torch.float64 else _AUTO.get(device.type, ("math",))
    for name in order:
        if reasons[name] is None:
            return name
        logger.info("attention kernel %s does not work here: %s", name, reasons[name])
    raise UserError(f"no attention kernel for {dtype} on {device}: {reasons['math']}")


@functools.cache
def _probed(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, head_dim_v: int
) -> str | None:
    """Tries one kernel on tiny blocks; returns why it fails, or None."""
    if not dtype.is_floating_point:
        return f"needs a floating dtype, got {dtype}"
    source = torch.Generator().manual_seed(0)  # leaves the global random state alone

    def random(num: int, heads: int, width: int) -> Tensor:
        return torch.randn(num, heads, width, generator=source).to(device, dtype)

    q, dout = random(16, 4, head_dim), random(16, 4, head_dim_v)
    k, v = random(16, 2, head_dim), random(16, 2, head_dim_v)
    kernel, truth = KERNELS[name], KERNELS["math"]
    try:
        refusal = kernel.refusal(q, k, v)
        if refusal is not None or kernel is truth:
            return refusal
        for got, wanted in zip(
            _tiny_run(kernel, dout, q, k, v), _tiny_run(truth, dout, q, k, v), strict=True
        ):
            assert_close(got, wanted, max(16, head_dim), dtype, f"the probe of {name}")
    except Exception as error:  # noqa: BLE001 - a private operator may throw anything
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None


def _tiny_run(kernel: Kernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Every result of one run with fewer keys than queries, and of uneven runs with and without a
    mask."""
    scale, lengths = q.shape[-1] ** -0.5, (5, 11)
    results: list[Tensor] = []
    with torch.no_grad():
        for runs in (Runs.dense(16, 9), Runs.own(lengths), Runs(lengths, (9, 7))):
            call = (q, k[: sum(runs.keys)], v[: sum(runs.keys)])
            part = kernel.forward(*call, runs, scale)
            results += [part.out, part.lse, *kernel.backward(dout, *call, *part, runs, scale)]
    return results
