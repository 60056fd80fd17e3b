"""Which calls of the merge compile, and for how long: as they come, and prepared.

    python -m benchmarks.merge_versions

As they come is `torch.compile(dynamic=True)` of the formula, which meets new kinds of calls during
training; prepared is megatron_prefix/attention/fused.py. On the GPU where there is one, else on the
CPU, where the library itself does not compile the merge. `TORCHINDUCTOR_FORCE_DISABLE_CACHES=1`
leaves out what earlier runs have left on disk.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from unittest import mock

import torch
from torch._dynamo.utils import counters

from megatron_prefix.attention import merge as merging
from megatron_prefix.attention.fused import Fused
from megatron_prefix.attention.interface import Partial

CALLS = [(2, 4000), (2, 4001), (3, 4000), (2, 1), (3, 1), (4, 4000), (6, 4000), (5, 4000), (2, 32)]
"""Parts and queries."""


def parts(num: int, rows: int, heads: int, width: int, device: str) -> list[Partial]:
    """Random results of blocks, in bf16."""
    outs = [torch.randn(rows, heads, width, device=device).bfloat16() for _ in range(num)]
    return [Partial(out, torch.randn(heads, rows, device=device)) for out in outs]


def versions() -> int:
    """Graphs that torch has compiled."""
    return counters["stats"]["unique_graphs"]


def timed(name: str, run: Callable[[], object]) -> None:
    """Prints what a call compiles; nothing where it compiles nothing."""
    before, begin = versions(), time.perf_counter()
    run()
    seconds, new = time.perf_counter() - begin, versions() - before
    if new:
        print(f"  {name}: {new} versions in {seconds:.2f} s")


def main() -> None:
    """Prints every call that compiles, both ways."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=32, help="query heads (default 32)")
    parser.add_argument("--width", type=int, default=128, help="of a head (default 128)")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    sizes = args.heads, args.width
    ways = {
        "as they come": torch.compile(merging._merge, dynamic=True),
        "prepared": Fused(merging._merge),
    }
    for way, combine in ways.items():
        print(f"{way}, on {device.type}:")
        with torch.no_grad(), mock.patch.object(merging, "_implementation", return_value=combine):
            timed("before", lambda: merging.prepare(device, torch.bfloat16, *sizes))
            for num, rows in CALLS:
                given = parts(num, rows, *sizes, device.type)
                timed(f"{num} parts, {rows} queries", lambda given=given: merging.merge(given))


if __name__ == "__main__":
    main()
