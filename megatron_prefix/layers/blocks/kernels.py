"""Chooses the attention kernel: by name, or by trying what works here.

A name is one of `KERNELS` in config.py (the classes are in operators.py), or two of
them: `a+b` takes runs without a mask to `a` and causal runs to `b`. FlashAttention-4 (`fa4`, an
extra) takes any shape at once, unequal runs in one call, and is fastest where it runs.
cuDNN is fast on long runs but builds a plan, on the host, for every new shape; FlashAttention-2
(`flash`) takes any shape as `fa4` does. `cudnn+flash` needs plans for runs without a mask only.
benchmarks/bench_kernels.py measures them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_prefix import config
from megatron_prefix.device.tolerance import assert_close
from megatron_prefix.errors import UserError, named
from megatron_prefix.layers.blocks.adaptive import AdaptiveKernel, CompositeKernel
from megatron_prefix.layers.blocks.batched import Batched
from megatron_prefix.layers.blocks.interface import Kernel, Runs
from megatron_prefix.layers.blocks.operators import (
    FA4_SHORT,
    CudnnKernel,
    Fa4Kernel,
    FlashCpuKernel,
    FlashKernel,
    MathKernel,
)

logger = logging.getLogger(__name__)


_CLASSES: tuple[type[Batched], ...] = (
    MathKernel, FlashCpuKernel, FlashKernel, CudnnKernel, Fa4Kernel,
)  # fmt: skip
KERNELS: dict[str, Batched] = {kernel.name: kernel() for kernel in _CLASSES}
"""The public kernels, by name."""
COMPILED = ("fa4",)
"""Kernels that compile for about half a minute before they first run."""
PROBE_ROWS = FA4_SHORT + 32
"""Queries of a probe: long enough for every call that has to be compiled."""
Probe = Callable[[str], "str | None"]
_AUTO = {"cuda": ("fa4", "cudnn", "flash", "math"), "cpu": ("flash_cpu", "math")}


def choose_kernel(
    name: str,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int | None = None,
    num_layers: int = 1,
    group: int = 2,
    compiles: bool = True,
    window: int | None = None,
) -> Kernel:
    """The kernel called ``name`` (see the table above), or the best one here for "auto".

    "auto" is `math` for fp64 and torch's flash on the CPU; on CUDA FlashAttention-4, then cuDNN or
    FlashAttention-2 by shape (layers/blocks/adaptive.py), or whichever of them works. Only kernels
    that could be chosen are tried. ``num_layers`` is how many attention layers will use it,
    ``group`` how many query heads a K/V head has; unless it ``compiles``, kernels of `COMPILED` are
    only asked whether they would take such tensors; ``window``: see `Batched`.

    Raises:
        UserError: a kernel that does not work here; it says why, and which do.
    """
    probe = probe_of(device, dtype, head_dim, head_dim_v, group, compiles, window)
    if name == "auto":
        best = _first_working(probe, torch.device(device), dtype)
        if best == "cudnn" and probe("flash") is None:
            return AdaptiveKernel(KERNELS["cudnn"], KERNELS["flash"], num_layers)
        return _with_window(KERNELS[best], window)
    parts = config.kernel_parts(name)
    for part in parts if window is None else parts[-1:]:
        reason = probe(part)
        if reason is not None:
            working = ", ".join(kernel for kernel in KERNELS if probe(kernel) is None)
            raise UserError(
                f"attention kernel {part!r} does not work here: {reason}; use {working}"
            )
    if len(parts) == 1 or window is not None:
        return _with_window(KERNELS[parts[-1]], window)
    return CompositeKernel(*(KERNELS[part] for part in parts))


def _with_window(kernel: Batched, window: int | None) -> Batched:
    return kernel if window is None else kernel.windowed(window) or kernel


def auto_order(device: torch.device | str, dtype: torch.dtype) -> tuple[str, ...]:
    """Kernels that "auto" may take, the best first."""
    if dtype is torch.float64:
        return ("math",)
    return _AUTO.get(torch.device(device).type, ("math",))


def _first_working(probe: Probe, device: torch.device, dtype: torch.dtype) -> str:
    for name in auto_order(device, dtype):
        reason = probe(name)
        if reason is None:
            return name
        logger.info("attention kernel %s does not work here: %s", name, reason)
    raise UserError(f"no attention kernel for {dtype} on {device}: {reason}")


def probe_of(
    device: torch.device | str, dtype: torch.dtype, head_dim: int, head_dim_v: int | None,
    group: int, compiles: bool, window: int | None = None,
) -> Probe:  # fmt: skip
    """A function from a kernel's name to why it does not work for these heads, or None."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    width_v = head_dim if head_dim_v is None else head_dim_v
    return lambda name: probed(name, device, dtype, head_dim, width_v, group, compiles, window)


@functools.cache
def probed(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    group: int = 2,
    compiles: bool = True,
    window: int | None = None,
) -> str | None:
    """Tries one kernel on small blocks; returns why it fails, or None."""
    if not dtype.is_floating_point:
        return f"needs a floating dtype, got {dtype}"
    source = torch.Generator().manual_seed(0)  # leaves the global random state alone

    def random(heads: int, width: int) -> Tensor:
        return torch.randn(PROBE_ROWS, heads, width, generator=source).to(device, dtype)

    q, dout = random(2 * group, head_dim), random(2 * group, head_dim_v)
    k, v = random(2, head_dim), random(2, head_dim_v)
    kernel, truth = KERNELS[name], KERNELS["math"]
    if window is not None:
        windowed = kernel.windowed(window)
        if windowed is None:
            return "has no sliding window"
        kernel, truth = windowed, _with_window(truth, window)
    try:
        refusal = kernel.refusal(q, k, v)
        untried = name in COMPILED and not compiles
        if refusal is not None or name == "math" or untried:
            return refusal
        terms = max(PROBE_ROWS * group, head_dim)
        for got, expected in zip(
            small_run(kernel, dout, q, k, v), small_run(truth, dout, q, k, v), strict=True
        ):
            assert_close(got, expected, terms, dtype, f"the probe of {name}")
    except Exception as error:  # noqa: BLE001 - a private operator may throw anything
        return named(error)
    return None


def small_run(kernel: Kernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Every result of one run and of uneven runs, without a mask, causal, and causal with more keys
    than queries."""
    scale, lengths = q.shape[-1] ** -0.5, (5, PROBE_ROWS - 5)
    results: list[Tensor] = []
    with torch.no_grad():
        for runs in (
            Runs.dense(PROBE_ROWS, PROBE_ROWS - 9),
            Runs.own((PROBE_ROWS,)),
            Runs.own(lengths),
            Runs(lengths, (PROBE_ROWS - 7, 7)),
            Runs((PROBE_ROWS - 40, 5), (PROBE_ROWS - 30, 30), causal=True),
        ):
            num_queries, num_keys = sum(runs.queries), sum(runs.keys)
            call = (q[:num_queries], k[:num_keys], v[:num_keys])
            part = kernel.forward(*call, runs, scale)
            gradients = kernel.backward(dout[:num_queries], *call, *part, runs, scale)
            results += [part.out, part.lse, *gradients]
    return results
