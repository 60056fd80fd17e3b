"""Whether steps of ranks that share experts end while their gradients are reduced during backwards.

    torchrun --nproc-per-node 2 -m benchmarks.overlap_experts rag_musique.jsonl.gz --device cuda
    torchrun --nproc-per-node 2 -m benchmarks.overlap_experts rag_hotpot_llm.jsonl.gz \\
        --model tiny-moe --max-tokens 256 --step-tokens 4000 --seeds 3

In one process group, with one model, the groups of a rollout file are shuffled by every seed, and
the first steps of what comes out are run by the stock schedule and by ours, once each: their
lengths and trees are new to the ranks. Every seed has a line, with the times of the slowest rank.
The last line says how many seeds ended. A seed that takes longer than its limit ends the run with
an exit code above 0: every rank writes what it was at, and where all of its threads are, to
OUTPUT/stacks-RANK.txt. Nothing is compared here: `megatron-prefix align` does that.
benchmarks/overlap_experts.sh runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from megatron_prefix.features.overlap.reductions import Reductions
from megatron_prefix.lab import runtime
from megatron_prefix.lab.cli import arguments
from megatron_prefix.lab.cli.inputs import load_groups
from megatron_prefix.lab.cli.modelling import add_model, model_options
from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.models.config import alignment
from megatron_prefix.lab.rl import loss, packing, passes
from megatron_prefix.lab.rl.job import fit_vocabulary
from megatron_prefix.lab.verify.align import made, of_this_rank
from megatron_prefix.megatron.stock import stock_schedule
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.schedule import PrefixSchedule

NUMBERS = (
    ("seeds", 20, "orders of the file's groups"),
    ("steps", 2, "of every seed"),
    ("step-tokens", 80_000, "of a step, or a few more"),
    ("max-tokens", None, "shorten rollouts"),
    ("verify", 0, "steps that `verify` compares with the stock schedule's"),
    ("seed-s", 120.0, "seconds after which a seed has hung; the first one has five times as many"),
)
"""Options for numbers: name, default, help."""


def options() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="of rollouts")
    for name, default, text in NUMBERS:
        kind = float if isinstance(default, float) else int
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text} ({default})")
    parser.add_argument("--stock-only", action="store_true", help="run the stock schedule alone")
    parser.add_argument("--output", default="runs/overlap_experts", help="folder (%(default)s)")
    arguments.add_baseline(parser)
    add_model(parser, model="qwen3-30b-a3b", dtype="bfloat16")
    arguments.add_layout(parser)
    arguments.add_lengths(parser)
    parser.set_defaults(ep=2, overlap_grad_reduce=True)
    return parser


class Watchdog:
    """Writes where this rank is if something takes too long, and ends it when all have done so.

    A thread of C writes, and the kernel ends: neither needs Python, which may wait in a collective.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = (folder / f"stacks-{rank}.txt").open("w", encoding="utf-8")

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """What runs inside must not take longer."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.dump_traceback_later(seconds, file=self._file)
        signal.setitimer(signal.ITIMER_REAL, 1.1 * seconds + 1)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()

    def at(self, what: str) -> None:
        """What begins now: the last one written is what stands."""
        self._file.seek(0)
        self._file.truncate()
        print(what, file=self._file, flush=True)


def milliseconds(schedule: Callable[..., Any], chunks: list[Any], items: Sequence[Any]) -> float:
    """One call, of the slowest rank; all ranks make it."""
    on_gpu = next(chunks[0].parameters()).is_cuda
    for chunk in chunks:
        chunk.zero_grad_buffer()
    dist.barrier()
    begin = time.perf_counter()
    passes.run(schedule, loss.forward_step(loss.GrpoConfig()), chunks, items)
    if on_gpu:
        torch.cuda.synchronize()
    device = next(chunks[0].parameters()).device
    spent = torch.tensor(1e3 * (time.perf_counter() - begin), device=device)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


@contextlib.contextmanager
def noting_overlap() -> Iterator[list[bool]]:
    """Of every step of ours, whether reductions began during its backwards."""
    begun: list[bool] = []
    stock = Reductions.start_rest

    def start_rest(self: Reductions) -> None:
        begun.append(self.begun)
        stock(self)

    Reductions.start_rest = start_rest  # type: ignore[method-assign]
    try:
        yield begun
    finally:
        Reductions.start_rest = stock  # type: ignore[method-assign]


def run_rank(given: argparse.Namespace, layout: Any, spec: Any, groups: Sequence[Group]) -> int:
    """One rank's part; the first prints. Returns how many seeds have ended."""
    options, baseline = model_options(given), arguments.baseline_of(given)
    config = arguments.config_of(given, mode="on", across_ranks="off", verify=given.verify)
    with contextlib.ExitStack() as leaving, noting_overlap() as begun, options.joined(layout):
        watchdog = Watchdog(Path(given.output), dist.get_rank())
        chunks = options.build(spec, layout)
        packing.check(chunks, baseline)
        schedules: dict[str, Any] = {"stock": stock_schedule()}
        if not given.stock_only:
            schedules["prefix"] = PrefixSchedule(config, Callbacks(passes_together=True))
        for seed in range(given.seeds):
            taken: dict[str, list[float]] = {name: [] for name in schedules}
            tokens, before = 0, len(begun)
            dist.barrier()  # so that all write before the first ends
            with watchdog.within(given.seed_s * (1 if seed else 5)):
                for number, step in enumerate(steps_of(given, groups, seed)):
                    mine, least = of_this_rank(spec, layout, step, config, baseline, seed)
                    items = made(mine, baseline, alignment(spec, layout), least, seed)
                    tokens += size_of(step)
                    for name, schedule in schedules.items():
                        watchdog.at(f"seed {seed}, step {number}, {name}")
                        taken[name].append(milliseconds(schedule, chunks, items))
            say(line(seed, tokens, taken, begun[before:]))
        watchdog.at("all seeds have ended, and the process group is left")
        leaving.enter_context(watchdog.within(given.seed_s))
    return int(given.seeds)


def steps_of(
    given: argparse.Namespace, groups: Sequence[Group], seed: int
) -> Iterator[list[Group]]:
    """The first steps of the groups in another order."""
    mixed = random.Random(seed).sample(groups, len(groups))
    return itertools.islice(cut(mixed, given.step_tokens), given.steps)


def size_of(step: Sequence[Group]) -> int:
    """Its tokens, without sharing."""
    return sum(len(rollout) for group in step for rollout in group.rollouts)


def cut(groups: Sequence[Group], tokens: int) -> Iterator[list[Group]]:
    """Consecutive steps of so many tokens or a few more; of a short file all of it."""
    step: list[Group] = []
    num = 0
    for group in groups:
        step.append(group)
        if size_of(step) >= tokens:
            yield step
            step, num = [], num + 1
    if step and not num:
        yield step


def line(seed: int, tokens: int, taken: dict[str, list[float]], begun: Sequence[bool]) -> str:
    """What a seed has taken."""
    shown = (
        f"{name} {' + '.join(f'{one:.0f}' for one in times)} ms" for name, times in taken.items()
    )
    early = f", reductions during backwards in {sum(begun)} of {len(begun)} steps of ours"
    return f"seed {seed}: {tokens:,} tokens, {', '.join(shown)}{early if begun else ''}"


def say(text: str) -> None:
    """Prints on the first rank."""
    if runtime.first_rank():
        print(text, flush=True)


def main() -> None:
    """Runs all seeds."""
    given = options().parse_args()
    given.rollouts, given.groups, given.progress = [given.file], None, False
    layout = arguments.layout_of(given, runtime.env_world_size())
    groups, _ = load_groups(given, model_options(given).spec().vocab_size)
    spec, mapped = fit_vocabulary(model_options(given), groups)
    ended = runtime.launch(
        run_rank, layout.world_size, given, layout, spec, mapped, device=given.device
    )
    say(f"{ended} of {given.seeds} ended")


if __name__ == "__main__":
    main()
