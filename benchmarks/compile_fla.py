"""Compiles flash-linear-attention's kernels for an H200 on a machine without a GPU.

    TRITON_CACHE_DIR=FOLDER python3 benchmarks/compile_fla.py [--heads 32] [--positions 16448]

Triton compiles for the device that its driver names, and needs no such device to do so; an
autotuner stores its choice next to the kernels. So the driver here only names the device, nothing
is launched, and of every autotuner's configurations the one is taken that was the fastest on an
H200 (`FASTEST`, of fla-core 0.4.2 in bfloat16 with triton 3.6.0; for the convolution it is a
guess). The folder works on a GPU with the same triton, fla-core and Python: with a folder made by
this script's first version, the rows of hybrid_h200.sh with an MLP tuned nothing, while tuning had
taken 212 s before (benchmarks/LOG.md). It takes a minute and a half of one core for 8,192
positions. Both schedules find the same kernels. Widths are those of Qwen3-Next-80B-A3B without
tensor parallelism.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner, Config
from triton.runtime.jit import JITFunction

DIM = 128
FASTEST = {
    "causal_conv1d_bwd_kernel": Config({"BD": 64}, num_warps=4),
    "causal_conv1d_fwd_kernel": Config({"BD": 64}, num_warps=4),
    "chunk_bwd_kernel_dqkwg": Config({}, num_warps=4, num_stages=3),
    "chunk_bwd_kernel_dv_local": Config({}, num_warps=4, num_stages=3),
    "chunk_fwd_kernel_o": Config({"BK": 64, "BV": 64}, num_warps=4, num_stages=3),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": Config({"BV": 32}, 4, 3),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": Config({"BV": 32}, 4, 3),
    "chunk_local_cumsum_scalar_kernel": Config({}, num_warps=2),
    "chunk_scaled_dot_kkt_fwd_kernel": Config({"BK": 128}, num_warps=8, num_stages=4),
    "l2norm_bwd_kernel": Config({"BT": 16}, num_warps=4),
    "l2norm_fwd_kernel": Config({"BT": 8}, num_warps=2),
    "merge_16x16_to_64x64_inverse_kernel": Config({"DOT_PRECISION": "ieee"}, 4, 3),
    "prepare_wy_repr_bwd_kernel": Config({}, num_warps=4, num_stages=3),
    "recompute_w_u_fwd_kernel": Config({}, num_warps=8, num_stages=3),
}


H200 = argparse.Namespace(  # as much of Triton's driver as compiling asks for
    utils=argparse.Namespace(
        get_device_properties=lambda _: {"max_shared_mem": 232448, "multiprocessor_count": 132}
    ),
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda _: 0,
    get_active_torch_device=lambda: torch.device("cpu"),
)


def compile_only() -> None:
    """From now on kernels are compiled but not launched; call it before fla is imported."""
    driver.set_active(H200)
    for name, value in {
        "get_device_name": lambda *_: "NVIDIA H200",
        "get_device_capability": lambda *_: (9, 0),
        "device_count": lambda: 1,
        "is_available": lambda: True,
    }.items():
        setattr(torch.cuda, name, value)
    stock = JITFunction.run
    JITFunction.run = lambda *a, warmup=True, **given: stock(*a, warmup=True, **given)
    Autotuner._bench = _preferred  # type: ignore[method-assign]
    import fla.utils

    fla.utils.custom_device_ctx = lambda _: contextlib.nullcontext()
    fla.utils.check_shared_mem = lambda *_: True


def _preferred(self: Any, *args: Any, config: Config, **given: Any) -> list[float]:
    wanted = FASTEST.get(self.base_fn.__name__)
    return [0.0 if wanted is None or str(wanted) == str(config) else 1.0] * 3


def rule(heads: int) -> Iterator[None]:
    """The rule as stock layers, roots, inner spans and waves call it."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v = (_random(1, 128, heads, DIM) for _ in range(3))
    beta, decay = _random(1, 128, heads), -torch.rand(1, 128, heads)
    ends = torch.tensor([0, 64, 128])
    packs = ends.int()  # as stock layers have them, since megatron-core 0.18
    calls = (None, 0, 0), (packs, 0, 0), (ends, 0, 0), (ends, 0, 1), (ends, 1, 1), (ends, 1, 0)
    for spans, parents, inner in calls:
        state = torch.zeros(2, heads, DIM, DIM, requires_grad=True) if parents else None
        lengths = {} if spans is None else {"cu_seqlens": spans, "cu_seqlens_cpu": ends}
        out, final = chunk_gated_delta_rule(
            q, k, v, decay.requires_grad_(), beta, initial_state=state,
            output_final_state=bool(inner), **lengths,
        )  # fmt: skip
        out.sum().backward(retain_graph=bool(inner))
        if inner:
            (out.sum() + final.sum()).backward()
        yield


def norms(positions: int, heads: int) -> Iterator[None]:
    """The norm of queries and keys; tuned anew every 65,536 rows, with both in one call (since
    megatron-core 0.18) `heads` of them a position."""
    from fla.modules.l2norm import l2norm

    for start in range(0, positions * heads, 65536):
        l2norm(_random(1, start + 16, 1, DIM)).sum().backward()
        yield


def convolutions(positions: int) -> Iterator[None]:
    """The convolution of megatron-core 0.18 and newer; tuned anew every 1,024 positions."""
    from fla.modules.convolution import causal_conv1d

    weight = _random(64 * DIM, 4)

    def one(rows: int, length: int, width: int, ends: Any = None) -> None:
        x = _random(rows, length, width)[..., : len(weight)]
        causal_conv1d(x, weight, activation="silu", cu_seqlens=ends)[0].sum().backward()

    for spans in (1, 3, 4, 16):  # their first positions
        one(spans, 6, len(weight))
    for start in range(0, positions, 1024):
        for length in (start + 63, start + 64):  # 16 divides it, or not
            one(1, length, 12352)
            one(1, length, 12352, torch.tensor([0, length // 2, length], dtype=torch.int32))
        yield


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


def main() -> None:
    """Compiles everything; prints one line per kind of kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=32, help="value heads of a rank")
    parser.add_argument("--positions", type=int, default=16448, help="most of one microbatch")
    given = parser.parse_args()
    compile_only()
    for kind in (
        rule(given.heads),
        norms(given.positions, given.heads),
        convolutions(given.positions),
    ):
        number = sum(1 for _ in kind)
        print(f"{kind.__name__}: {number}", flush=True)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
