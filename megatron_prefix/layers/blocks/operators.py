"""Five stock kernels; the only file that names private operators of torch and flash-attn.

| name        | operator                                          | takes                         |
|-------------|---------------------------------------------------|-------------------------------|
| `math`      | the formulas in math.py                           | any device and float dtype    |
| `flash_cpu` | aten._scaled_dot_product_flash_attention_for_cpu  | CPU, dv = d                   |
| `flash`     | aten._flash_attention_forward: FlashAttention-2   | CUDA, 16 bit, dv = d          |
| `cudnn`     | aten._scaled_dot_product_cudnn_attention          | CUDA, 16 bit                  |
| `fa4`       | flash_attn.cute: FlashAttention-4                 | Hopper and Blackwell, 16 bit  |

All but `math` get q, k and v as views. megatron_prefix/layers/blocks/kernels.py chooses among them.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_prefix.errors import UserError
from megatron_prefix.layers.blocks import math as exact
from megatron_prefix.layers.blocks.batched import Batched, Saved, SplitCausal, batches, joined
from megatron_prefix.layers.blocks.interface import Aux, Gradients, Partial, Runs
from megatron_prefix.layers.blocks.repeated import Repeated

logger = logging.getLogger(__name__)

aten = torch.ops.aten

FA4_SHORT = 256
"""Queries or keys up to which flash-attn-4 compiles a call for itself (see `Fa4Kernel`)."""
FA4_RUNS = 256
"""Most runs of a call; for more it compiles again (flash_attn.cute.interface,
BIN_BATCH_SEARCH_THRESH)."""


class MathKernel(Batched):
    """Exact and slow: the truth for the others, and the kernel for fp64."""

    name, has_windows, takes_fronts = "math", True, True

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Aux]:
        return *exact.attend(q, k, v, scale, causal, self.window), ()

    def attend_backward(self, saved: Saved, aux: Aux, scale: float, causal: bool) -> Gradients:
        return exact.attend_backward(*saved, scale, causal, self.window)


class FlashCpuKernel(SplitCausal):
    """torch's tiled CPU kernel: fp64, fp32, bf16, fp16.

    Its fp32 forward has a fast exponential (about 20 bits); its 16-bit backward sums dk and dv in
    16 bits. It needs as many K/V heads as query heads: for one run they are views with stride 0
    over the group, for several runs they are copied (a wave's own K/V, not a prefix's).
    """

    name = "flash_cpu"

    def refusal(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        if q.device.type != "cpu":
            return f"runs on the CPU, got {q.device}"
        return _needs_equal_widths(q, v) or super().refusal(q, k, v)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Aux]:
        heads = (_query_heads(q, k), _kv_heads(q, k), _kv_heads(q, v))
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, 0.0, causal, scale=scale
        )
        return _from_query_heads(out, q), lse.reshape(q.shape[0], q.shape[2], q.shape[1]), ()

    def attend_backward(self, saved: Saved, aux: Aux, scale: float, causal: bool) -> Gradients:
        dout, q, k, v, out, lse = saved
        queries = _query_heads(q, k)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _query_heads(dout, k), queries, _kv_heads(q, k), _kv_heads(q, v), _query_heads(out, k),
            lse.reshape(queries.shape[:3]), 0.0, causal, scale=scale,
        )  # fmt: skip
        group = (k.shape[2], -1)
        dk, dv = (_from_query_heads(x, q).unflatten(2, group).sum(3) for x in (dk, dv))
        return _from_query_heads(dq, q), dk, dv


class _Aligned(Batched):
    def guard(self, q: Tensor, k: Tensor, v: Tensor, *backward_inputs: Tensor) -> None:
        why = _misaligned(q, k, v, *backward_inputs)
        if why is not None:
            raise UserError(f"attention kernel {self.name!r} {why}; give --kernel math")


class CudnnKernel(_Aligned, SplitCausal):
    """cuDNN's fused attention.

    Runs of a single query or key, which it cannot take, run with the exact formulas.
    """

    name = "cudnn"

    def refusal(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        return _needs_cuda_16bit(q, k, v) or super().refusal(q, k, v)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Aux]:
        if 1 in (q.shape[1], k.shape[1]):
            return *exact.attend(q, k, v, scale, causal), ()
        heads = (x.transpose(1, 2) for x in (q, k, v))
        out, stats, *state, _ = aten._scaled_dot_product_cudnn_attention(
            *heads, None, True, 0.0, causal, False, scale=scale
        )
        lse = stats.reshape(q.shape[0], q.shape[2], q.shape[1])
        return out.transpose(1, 2), lse, (out.stride(), stats.shape, stats.stride(), *state)

    def attend_backward(self, saved: Saved, aux: Aux, scale: float, causal: bool) -> Gradients:
        if not aux:
            return exact.attend_backward(*saved, scale, causal)
        dout, q, k, v, out = (x.transpose(1, 2) for x in saved[:5])
        # cuDNN caches a plan by the strides of q, k and v only. The other tensors need the strides
        # of the forward, or a cached plan would read them with another call's strides.
        strides, stats_shape, stats_strides, *spans, seed, offset = aux
        stats = saved.lse.reshape(stats_shape)
        gradients = aten._scaled_dot_product_cudnn_attention_backward(
            laid_out(dout, strides), q, k, v, laid_out(out, strides),
            laid_out(stats, stats_strides), seed, offset, None, *spans, 0.0, causal, scale=scale,
        )  # fmt: skip
        dq, dk, dv = (x.transpose(1, 2) for x in gradients)
        return dq, dk, dv


Call = tuple[slice, slice, dict[str, Any]]
"""Queries, keys and arguments of a varlen call."""


class _Varlen(Batched):
    """Runs that are a batch as one dense call, any others as varlen calls.

    With ``lengths`` of runs `attend` and `attend_backward` get tensors without a leading dimension.

    Attributes:
        short: equal runs with at most so many queries or keys are a varlen call, too.
    """

    takes_fronts = True
    short = 0
    most_runs = sys.maxsize

    def forward(self, q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float) -> Partial:
        batches(runs, q.shape[0], k.shape[0])  # refuses runs that do not fit
        if _shortest(runs) > self.short:
            return super().forward(q, k, v, runs, scale)
        self.guard(q, k, v)
        calls = _calls(runs, q.device, self.most_runs, self.short)
        if len(calls) == 1:
            return Partial(*self.attend(q, k, v, scale, runs.causal, **calls[0][2]))
        parts = [
            self.attend(q[rows], k[keys], v[keys], scale, runs.causal, **lengths)
            for rows, keys, lengths in calls
        ]
        outs, lses = [out for out, _, _ in parts], [lse for _, lse, _ in parts]
        return Partial(joined(outs), joined(lses, dim=1))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, aux: Aux,
        runs: Runs, scale: float,
    ) -> Gradients:  # fmt: skip
        batches(runs, q.shape[0], k.shape[0])
        if _shortest(runs) > self.short:
            return super().backward(dout, q, k, v, out, lse, aux, runs, scale)
        self.guard(q, k, v, dout, out)
        calls = _calls(runs, q.device, self.most_runs, self.short)
        if len(calls) == 1:
            saved = Saved(dout, q, k, v, out, lse)
            return self.attend_backward(saved, aux, scale, runs.causal, **calls[0][2])
        shares = [
            self.attend_backward(
                Saved(dout[rows], q[rows], k[keys], v[keys], out[rows], lse[:, rows]),
                aux, scale, runs.causal, **lengths,
            )
            for rows, keys, lengths in calls
        ]  # fmt: skip
        dq, dk, dv = (joined(gradients) for gradients in zip(*shares, strict=True))
        return dq, dk, dv


class FlashKernel(_Aligned, _Varlen):
    """FlashAttention-2 of torch."""

    name, has_windows = "flash", True

    def refusal(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        return _needs_cuda_16bit(q, k, v) or _needs_equal_widths(q, v) or super().refusal(q, k, v)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, **lengths: Any
    ) -> tuple[Tensor, Tensor, Aux]:
        """See `Batched.attend`; with ``lengths`` as `_Varlen`."""
        out, lse, *state, _ = aten._flash_attention_forward(
            q, k, v, *self._lengths(q, k, lengths), 0.0, causal, False, scale=scale,
            **self._window(causal),
        )  # fmt: skip
        return out, lse, tuple(state)

    def attend_backward(
        self, saved: Saved, aux: Aux, scale: float, causal: bool, **lengths: Any
    ) -> Gradients:
        dout, q, k, v, out, lse = saved
        return aten._flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(), *self._lengths(q, k, lengths), 0.0, causal, *aux,
            scale=scale, **self._window(causal),
        )  # fmt: skip

    @staticmethod
    def _lengths(q: Tensor, k: Tensor, lengths: dict[str, Any]) -> tuple[Any, ...]:
        return (*lengths.values(),) if lengths else (None, None, q.shape[1], k.shape[1])

    def _window(self, causal: bool) -> dict[str, int]:
        if self.window is None or not causal:
            return {}
        return {"window_size_left": self.window, "window_size_right": 0}


class Fa4Kernel(_Varlen):
    """FlashAttention-4: equal long runs are a dense call, anything else one varlen call.

    It needs no plan for a shape, but compiles for seconds: for each dtype, pair of widths, number
    of query heads a K/V head, mask, and dense or varlen call; again for calls of one or two tiles,
    and for more than 256 runs. So short runs are varlen calls too, whose bounds on the lengths are
    never short, and more runs are several calls, joined by a copy. What is left are four forwards
    and four backwards, which probing compiles before the first step (layers/blocks/kernels.py).

    It relies on these facts of flash-attn-4 4.0.0b36, in flash_attn.cute:

    - interface: lse is fp32, [n, h, s] dense and [h, s] varlen. max_seqlen_q and max_seqlen_k
      are upper bounds, which choose a kernel and size its grid. Strided views with rows aligned to
      16 bytes are read as they lie, others are copied (cute_dsl_utils, `maybe_contiguous`).
    - Outputs and gradients are not zeroed first: rows outside every run would stay unwritten. Runs
      are never empty and cover all rows.
    - Sums of gradients are fp32, padded for each run (seqlen_info, `padded_offset_k`): wrong if
      the keys of a run lay before those of the run before it. Those of `Runs` never do.
    - dk and dv are summed over the query heads of a K/V head in fp32, and rounded once. The order
      of the sums differs from call to call (``deterministic`` is off).
    """

    name, has_windows = "fa4", True
    short, most_runs = FA4_SHORT, FA4_RUNS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._repeated = Repeated()

    def begin_step(self) -> None:
        self._repeated.forget()

    def refusal(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        return _needs_cuda_16bit(q, k, v) or super().refusal(q, k, v) or _needs_fa4(q, k, v)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, **lengths: Any
    ) -> tuple[Tensor, Tensor, Aux]:
        """See `Batched.attend`; with ``lengths`` of runs the tensors have no leading dimension."""
        _say_that_it_compiles(q.dtype, q.shape[-1], v.shape[-1], q.shape[-2] // k.shape[-2])
        out, lse = self._repeated(
            flash_attn_4()._flash_attn_fwd, q, k, v,
            softmax_scale=scale, return_lse=True, **self._mask(causal), **lengths,
        )  # fmt: skip
        return out, lse, ()

    def attend_backward(
        self, saved: Saved, aux: Aux, scale: float, causal: bool, **lengths: Any
    ) -> Gradients:
        dout, q, k, v, out, lse = saved
        dq, dk, dv = flash_attn_4()._flash_attn_bwd(
            q, k, v, out, dout, lse.contiguous(), softmax_scale=scale, **self._mask(causal),
            **lengths,
        )  # fmt: skip
        return dq, dk, dv

    def _mask(self, causal: bool) -> dict[str, Any]:
        if self.window is None or not causal:
            return {"causal": causal}
        # A window takes the place of the causal mask; it ends with the last query and key, too.
        return {"causal": False, "window_size_left": self.window, "window_size_right": 0}


def _needs_cuda_16bit(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if q.device.type != "cuda":
        return f"needs a CUDA device, got {q.device}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got {q.dtype}"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return f"needs compute capability 8.0, got {torch.cuda.get_device_name(q.device)}"
    for width in (q.shape[-1], v.shape[-1]):
        if width % 8 or width > 256:
            return f"takes head widths that are multiples of 8 up to 256, got {width}"
    return _misaligned(q, k, v)


def _misaligned(q: Tensor, k: Tensor, v: Tensor, *bases: Tensor) -> str | None:
    """What is wrong with where tensors of 16 bits lie; None if nothing is.

    On a misaligned address the kernels do not fail with a message: they fault, and take the
    process's CUDA context with them. `bases` is copied where its strides are not the kernel's, so
    only its base counts.
    """
    for x in (q, k, v):
        strides = zip(x.shape[:-1], x.stride()[:-1], strict=True)
        if any(size > 1 and stride % 8 for size, stride in strides):
            return f"needs rows aligned to 16 bytes, got strides {x.stride()}"
    for x in (q, k, v, *bases):
        if x.data_ptr() % 16:
            return f"needs tensors aligned to 16 bytes, got one {x.data_ptr() % 16} bytes off"
    return None


def _needs_fa4(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    major, minor = torch.cuda.get_device_capability(q.device)
    widths = (q.shape[-1], v.shape[-1])
    if major not in (9, 10):
        return f"runs on Hopper and Blackwell (capability 9.x and 10.x), got {major}.{minor}"
    if major == 9 and widths[0] != widths[1] and q.shape[1] != k.shape[1]:
        # flash_attn.cute.flash_bwd_sm90, FlashAttentionBackwardSm90
        return f"needs values as wide as queries where K/V heads are shared, got {widths}"
    if major == 10 and max(widths) > 128 and widths not in ((192, 128), (256, 256)):
        # flash_attn.cute.interface, _validate_head_dims
        return f"takes head widths up to 128, (192, 128) and (256, 256) on Blackwell, got {widths}"
    try:
        flash_attn_4()
    except ImportError as error:
        why = str(error).strip().splitlines()[0]
        return f"needs flash-attn-4: pip install flash-attn-4==4.0.0b36 ({why})"
    return None


@functools.cache
def flash_attn_4() -> Any:
    """The module of flash-attn-4 whose functions return and take a log-sum-exp.

    Imported at the first use: it loads a compiler. It is told to keep what it compiles on disk,
    unless the environment says otherwise; it reads that when it is imported. What it finds on disk
    is for the same sources, versions and calls (cache_utils, `_compute_source_fingerprint`), and is
    probed like what it compiles. Raises ImportError without the package.
    """
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    return importlib.import_module("flash_attn.cute.interface")


@functools.cache
def _say_that_it_compiles(dtype: torch.dtype, width: int, width_v: int, group: int) -> None:
    folder = _fa4_folder()
    note = (
        f"results are kept in {folder}"
        if folder
        else "once a process; FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 keeps the results on disk"
    )
    logger.warning(
        "attention kernel fa4 compiles for %s, head widths %d and %d, %d query heads a K/V head: "
        "about half a minute (%s)",
        *(dtype, width, width_v, group, note),
    )


def _fa4_folder() -> str | None:
    try:
        cache = importlib.import_module("flash_attn.cute.cache_utils")
        return str(cache.get_cache_path()) if cache.CUTE_DSL_CACHE_ENABLED else None
    except (ImportError, AttributeError, OSError):  # another version, or no right to the folder
        return None


@functools.lru_cache(maxsize=1024)
def _shortest(runs: Runs) -> int:
    alike = len(set(zip(runs.queries, runs.keys, strict=True))) == 1
    return min(runs.queries[0], runs.keys[0]) if alike else 0


@functools.lru_cache(maxsize=1024)
def _calls(runs: Runs, device: torch.device, most: int, short: int) -> tuple[Call, ...]:
    """Varlen calls for all runs, cached as the layers of a segment have the same runs; `most` and
    `short` are `_Varlen.most_runs` and `.short`."""
    num = len(runs.queries)
    per_call = -(-num // -(-num // most))  # as equal as they can be: 257 runs are 129 and 128
    calls, start, key_start = [], 0, 0
    for first in range(0, num, per_call):
        queries, keys = runs.queries[first : first + per_call], runs.keys[first : first + per_call]
        starts = _starts(queries, device)
        lengths = {
            "cu_seqlens_q": starts,
            "cu_seqlens_k": starts if keys == queries else _starts(keys, device),
            "max_seqlen_q": max(*queries, short + 1),
            "max_seqlen_k": max(*keys, short + 1),
        }
        end, key_end = start + sum(queries), key_start + sum(keys)
        calls.append((slice(start, end), slice(key_start, key_end), lengths))
        start, key_start = end, key_end
    return tuple(calls)


def _needs_equal_widths(q: Tensor, v: Tensor) -> str | None:
    if q.shape[-1] != v.shape[-1]:
        return f"needs values as wide as queries, got {v.shape[-1]} and {q.shape[-1]}"
    return None


def _starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """First position of each run and the end, int32 on ``device``; the host does not wait."""
    host = torch.tensor(
        [0, *accumulate(lengths)], dtype=torch.int32, pin_memory=device.type == "cuda"
    )
    return host.to(device, non_blocking=True)


def _query_heads(x: Tensor, k: Tensor) -> Tensor:
    """[n, s, h, d] as a view: [h_kv, group, s, d] for a single run, else [n, h, s, d]."""
    if x.shape[0] > 1:
        return x.transpose(1, 2)
    return x[0].unflatten(1, (k.shape[2], -1)).permute(1, 2, 0, 3)


def _kv_heads(q: Tensor, x: Tensor) -> Tensor:
    """K or V [n, t, h_kv, d] to match `_query_heads`; for a single run with stride 0."""
    group = q.shape[2] // x.shape[2]
    repeated = x.unsqueeze(3).expand(-1, -1, -1, group, -1)
    if x.shape[0] > 1:
        return repeated.flatten(2, 3).transpose(1, 2)
    return repeated[0].permute(1, 2, 0, 3)


def _from_query_heads(x: Tensor, q: Tensor) -> Tensor:
    if q.shape[0] > 1:
        return x.transpose(1, 2)
    return x.permute(2, 0, 1, 3).flatten(1, 2)[None]


def laid_out(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """x with these strides; a copy unless only dimensions of size 1 differ."""
    if all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), strides, strict=True)):
        return x.as_strided(x.shape, strides)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
