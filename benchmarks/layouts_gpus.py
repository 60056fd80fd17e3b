"""Both schedules in layouts of several GPUs over NCCL, row after row in one job.

    torchrun --nproc-per-node 2 -m benchmarks.layouts_gpus OUTPUT --rows tp pp --sets rag_musique
    torchrun --nproc-per-node 4 -m benchmarks.layouts_gpus OUTPUT --rows pp4 ep4 -- --repeats 3

A row is a call of `megatron-prefix bench` with the arguments of `ROWS`, those behind `--`, and the
ones that all rows have: aligned first, then timed on packs, with transformer-engine and
flash-attn-4.  OUTPUT gets ROW.json of each row and `layouts_gpus.jsonl` with a line for each shape
and file; a row whose ROW.json is there is not run again, so the same command goes on where it was
stopped.  What a row that failed has written is ROW.failed.json.  A row that takes longer than
--row-s prints where every thread is, and ends the job.  Exit code 0 when all rows were aligned and
timed.  benchmarks/layouts_gpus.sh runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch

from benchmarks import stock_fa4
from megatron_prefix.errors import UserError
from megatron_prefix.lab import runtime
from megatron_prefix.lab.cli.main import main

SHAPE = ("--shapes", "10240:2048:8")
DENSE = ("--model", "qwen3-8b", "--set", "num_layers=12")
EXPERTS = ("--model", "qwen3-30b-a3b", "--set", "num_layers=12")
FEW_EXPERTS = ("--model", "qwen3-30b-a3b", "--set", "num_layers=6")
LATENTS = (
    "--model", "moonlight-16b-a3b", "--set", "num_layers=6", "--set", "num_moe_experts=16",
    "--set", "max_position=32768",
)  # fmt: skip
OSS = (
    "--model", "gpt-oss-20b", "--set", "num_layers=6", "--set", "num_moe_experts=8",
    "--set", "softmax_type=vanilla",
)  # fmt: skip
FP8 = (
    "--model", "llama3-8b", "--set", "num_layers=8", "--set", "vocab_size=32768",
    "--set", "fp8=e4m3", "--set", "fp8_recipe=blockwise",
)  # fmt: skip
WINDOWS = ("--set", "window_size=127,0", "--set", "window_attn_skip_freq=2")
DEPTHS = ("--set", "vocab_size=65536", "--set")
TP = ("--tp", "2", "--sequence-parallel")
CP = ("--cp", "2", "--overlap-grad-reduce")
PP = ("--pp", "2", "--shape-groups", "2", "--chunk-tokens", "4096")
EP = ("--ep", "2", "--overlap-grad-reduce")
DP = ("--dp", "2", "--overlap-grad-reduce")
FILES = "files"
"""In a row: it also has a step of each file of --sets."""
FILES_ONLY = "files only"
"""In a row: it has nothing else."""
FA4 = "flash-attn-4"
"""In a row: the stock schedule has flash-attn-4, too, since transformer-engine's own attention of
packs with windows materialises scores."""

ROWS: dict[str, tuple[str, ...]] = {
    "tp": (*DENSE, *SHAPE, *TP, FILES),
    "cp": (*DENSE, *SHAPE, *CP, FILES),
    "cp-wave": (*DENSE, *SHAPE, *CP, "--cp-reduce", "wave", FILES),
    "cp-segment": (*DENSE, *SHAPE, *CP, "--cp-reduce", "segment", FILES),
    "pp": (*DENSE, *SHAPE, *PP, FILES),
    "dp": (*DENSE, *SHAPE, *DP),
    "ep": (*EXPERTS, *SHAPE, *EP, FILES),
    "ep-plain": (*EXPERTS, *SHAPE, "--ep", "2"),
    "dp-groups": (*DENSE, *DP, FILES_ONLY),
    "dp-length": (*DENSE, *DP, "--deal", "length", "--across-ranks", "off", FILES_ONLY),
    "dp-across": (*DENSE, *DP, "--deal", "length", "--across-ranks", "on", FILES_ONLY),
    "experts-groups": (*FEW_EXPERTS, *DP, FILES_ONLY),
    "experts-length": (*FEW_EXPERTS, *DP, "--deal", "length", "--across-ranks", "off", FILES_ONLY),
    "experts-across": (*FEW_EXPERTS, *DP, "--deal", "length", "--across-ranks", "on", FILES_ONLY),
    "latents-tp": (*LATENTS, *SHAPE, *TP),
    "latents-pp": (*LATENTS, *SHAPE, *PP),
    # Megatron refuses biases of experts with TP: widths of Qwen3-8B with gpt-oss's windows.
    "windows-tp": (*DENSE, *WINDOWS, *SHAPE, *TP, FA4),
    "windows-pp": (*OSS, *SHAPE, *PP, FA4),
    "fp8-tp": (*FP8, *SHAPE, *TP),
    "fp8-pp": (*FP8, *SHAPE, *PP),
    "mtp2-tp": (*DENSE, *DEPTHS, "mtp_num_layers=2", *SHAPE, *TP),
    "mtp2-pp": (*DENSE, *DEPTHS, "mtp_num_layers=2", *SHAPE, *PP),
    "mtp5-tp": (*DENSE, *DEPTHS, "mtp_num_layers=5", *SHAPE, *TP),
    "mtp5-pp": (*DENSE, *DEPTHS, "mtp_num_layers=5", *SHAPE, *PP),
    "pp4": (*DENSE, *SHAPE, "--pp", "4", "--shape-groups", "4", "--chunk-tokens", "4096", FILES),
    "tp2-pp2": (*DENSE, *SHAPE, *TP, *PP, FILES),
    "cp4": (*DENSE, *SHAPE, "--cp", "4", "--overlap-grad-reduce", FILES),
    "ep4": (*EXPERTS, *SHAPE, "--ep", "4", "--overlap-grad-reduce", FILES),
}
"""By name, the arguments of `bench`."""
COMMON = (
    "--dtype", "bfloat16", "--device", "cuda", "--align-layers", "1", "--warm-up-calls", "2",
    "--repeats", "2", "--prefix-schedule", "auto", "--progress",
)  # fmt: skip
STEPS = ("--warm-up", "1", "--steps", "2", "--rehearse")


def options() -> argparse.ArgumentParser:
    """Of the command line; what is behind `--` goes to `bench`."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="folder of the results")
    rows = parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help="of ROWS")
    rows.default = ["tp", "cp", "pp", "dp", "ep"]
    parser.add_argument("--sets", nargs="*", default=[], metavar="SET", help="rollout files")
    parser.add_argument("--data", default="../shared/data", help="the folder of those files")
    parser.add_argument("--step-tokens", type=int, default=100_000, help="per data-parallel rank")
    parser.add_argument("--row-s", type=float, default=280.0, help="seconds of one row")
    return parser


def words(name: str, args: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """The arguments of `bench` for a row."""
    row, files = ROWS[name], []
    if args.sets and (FILES in row or FILES_ONLY in row):
        ranks = [int(row[row.index(flag) + 1]) for flag in ("--dp", "--ep") if flag in row]
        tokens = args.step_tokens * max(ranks, default=1)
        files = ["--rollouts", *(f"{args.data}/{one}.jsonl.gz" for one in args.sets)]
        files += [*STEPS, "--step-tokens", str(tokens)]
    elif FILES_ONLY in row:
        raise UserError(f"row {name} has steps of rollout files alone: name some with --sets")
    own = [word for word in row if word not in (FILES, FILES_ONLY, FA4)]
    outputs = ["--bench-json", str(args.output / f"{name}.json")]
    outputs += ["--record", str(args.output / "layouts_gpus.jsonl")]
    return [*own, *files, *COMMON, *outputs, *rest]


def run(name: str, args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """One row; returns `bench`'s exit code."""
    faulthandler.dump_traceback_later(args.row_s, exit=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(sys, "argv", ["megatron-prefix", "bench", *arguments])
        )
        if FA4 in ROWS[name]:
            stack.enter_context(stock_fa4.replaced())
        code = main(["bench", *arguments])
    faulthandler.cancel_dump_traceback_later()
    result = args.output / f"{name}.json"
    if code and runtime.first_rank() and result.exists():
        result.rename(result.with_suffix(".failed.json"))
    gc.collect()
    torch.cuda.empty_cache()
    return code


def all_rows(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """One after the other; the first rank says which."""
    jobs = {name: words(name, args, rest) for name in args.rows}
    args.output.mkdir(parents=True, exist_ok=True)
    status = 0
    done = [name for name in args.rows if (args.output / f"{name}.json").exists()]
    for name, arguments in jobs.items():
        if runtime.first_rank():
            left = torch.cuda.memory_allocated() / 2**30
            state = "done before" if name in done else f"{left:.2f} GiB are in use"
            print(f"== {name}: {state}, {time.strftime('%T')}", file=sys.stderr, flush=True)
        if name not in done:
            status = max(status, run(name, args, arguments))
    return status


if __name__ == "__main__":
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    try:
        raise SystemExit(all_rows(options().parse_args(given[:split]), given[split + 1 :]))
    except UserError as error:
        print(f"layouts_gpus: {error}", file=sys.stderr)
        raise SystemExit(2) from None
