"""What is compiled beside this process (device/compile_pool.py), and the processes that do it.

Flash-attn-4's kernels: each process makes one call of the probe. Those of the gated delta rule:
Triton's autotuners try some 20 variants of each kernel, and most of the time goes into compiling
them. Every process runs the same calls, launches nothing, and compiles every so-many-th variant;
this process then finds them all, and only measures them.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megatron_prefix.device.compile_pool import compile_beside, end_with_starter, workers

MODULE = "megatron_prefix.layers.compiling"
PACKAGES = ("torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl", "fla-core")
SECONDS = 240.0
"""After which the processes are ended, and what is left is compiled as it is met."""


def attention(folder: Path, num_calls: int, **call: Any) -> None:
    """Compiles flash-attn-4's kernels for the calls of a probe.

    Args:
        folder: in which it keeps them.
        num_calls: of the probe, each forward and backward.
        call: the other arguments of `kernels.run_one`, as JSON has them.
    """
    each = itertools.product(range(num_calls), (False, True))
    jobs = [_job("attention", number=n, backward=back, **call) for n, back in each]
    compile_beside("attention kernel fa4", jobs, folder, _key("fa4", call), SECONDS)


def rule(key_dim: int, value_dim: int, heads: int) -> None:
    """Compiles flash-linear-attention's kernels of the gated delta rule, as they are probed."""
    sizes = {"key_dim": key_dim, "value_dim": value_dim, "heads": heads}
    parts = workers()
    device = torch.cuda.current_device()
    jobs = [_job("rule", device=device, part=p, parts=parts, **sizes) for p in range(parts)]
    compile_beside("GatedDeltaNet", jobs, triton_folder(), _key("rule", sizes), SECONDS)


def triton_folder() -> Path:
    """Where Triton keeps what it compiles."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")


def _job(kind: str, **arguments: Any) -> list[str]:
    return ["-m", MODULE, kind, json.dumps(arguments)]


def _key(kind: str, arguments: dict[str, Any]) -> str:
    """What compiled kernels are good for: other versions, devices and widths have their own."""
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name()
    return json.dumps([kind, versions, sys.version, device, arguments], sort_keys=True)


# In the processes ---------------------------------------------------------------------------------


def compile_share(part: int, parts: int) -> None:
    """From now on Triton launches nothing, and compiles every `parts`-th call of a kernel only,
    the `part`-th among them; autotuners neither measure nor keep a choice."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    stock, calls = JITFunction.run, itertools.count()

    def run(self: Any, *args: Any, warmup: bool = False, **given: Any) -> None:
        if next(calls) % parts == part:
            stock(self, *args, warmup=True, **given)

    def measured(call: Callable[[], Any], **_: Any) -> list[float]:
        call()
        return [0.0] * 3

    def unkept(_: Any, key: Any, configs: Any, bench: Callable[[], Any]) -> bool:
        bench()
        return False

    JITFunction.run = run
    Autotuner.do_bench = property(lambda _: measured)  # type: ignore[assignment]
    Autotuner.check_disk_cache = unkept


def _attention(device: int, dtype: str, **call: Any) -> None:
    from megatron_prefix.layers.blocks import kernels

    kernels.run_one(torch.device("cuda", device), getattr(torch, dtype), **call)


def _rule(device: int, part: int, parts: int, **sizes: int) -> None:
    from megatron_prefix.layers.recurrent import probe

    torch.cuda.set_device(device)
    compile_share(part, parts)
    probe.run_once("cuda", **sizes)


def main() -> None:
    """Does one job: its kind and its arguments as JSON."""
    end_with_starter()
    kind, arguments = sys.argv[1:]
    {"attention": _attention, "rule": _rule}[kind](**json.loads(arguments))


if __name__ == "__main__":
    main()
