"""Which attention kernels work here, and why "auto" takes the one that it takes."""

from __future__ import annotations

import torch

from megatron_prefix.layers.blocks.kernels import KERNELS, auto_order, choose_kernel, probe_of


def available(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    group: int = 2,
    compiles: bool = True,
    head_dim_v: int | None = None,
) -> dict[str, str | None]:
    """Every kernel by name, with the reason why it does not work here; None: it works.

    Each kernel runs small blocks of each kind, forward and backward, and is compared with `math`
    under the numerics policy; the answer is cached. `fa4` compiles here, for about half a minute.

    Args:
        device: where it is to run.
        dtype: of queries, keys and values.
        head_dim: width of a head.
        head_dim_v: of its values (default: the same).
        group: query heads of each K/V head.
        compiles: if not, kernels of `COMPILED` are not run, only asked whether they would take such
            tensors.
    """
    probe = probe_of(device, dtype, head_dim, head_dim_v, group, compiles)
    return {name: probe(name) for name in KERNELS}


def why(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    group: int = 2,
    compiles: bool = True,
    head_dim_v: int | None = None,
) -> str:
    """The kernel that "auto" takes and the reason, in one line; arguments as in `available`.

    Raises UserError if none works.
    """
    chosen = choose_kernel(
        "auto", device, dtype, head_dim, head_dim_v, group=group, compiles=compiles
    ).name
    if dtype is torch.float64:
        return f"{chosen}, which is exact"
    probe = probe_of(device, dtype, head_dim, head_dim_v, group, compiles)
    order = auto_order(device, dtype)
    better: dict[str, list[str]] = {}  # by what is in the way
    for name in order[: order.index(chosen.split()[0])]:
        better.setdefault(probe(name) or "", []).append(name)
    if not better:
        return f"{chosen}, the fastest here"
    lines = [
        f"{name} {reason}" + (f" ({', '.join(alike)} likewise)" if alike else "")
        for reason, (name, *alike) in better.items()
    ]
    return f"{chosen}: {'; '.join(lines)}"
