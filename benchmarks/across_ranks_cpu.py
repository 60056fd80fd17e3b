"""What sharing prompts across data-parallel ranks is worth on two CPU cores, with gloo.

    python -m benchmarks.across_ranks_cpu ../shared/data/rag_hotpot_llm.jsonl.gz
    python -m benchmarks.across_ranks_cpu rag_hotpot_llm.jsonl.gz --step-tokens 24000 \\
        --max-tokens 2048 --warm-up 1 --steps 2 --rounds 8

Two data-parallel ranks, one a core, have consecutive steps of a rollout file (one of its first 24
groups, unless said), dealt by length.  In one job, with one model, every step runs with
--across-ranks off and on in turn; each round prints the milliseconds of the slowest rank and, in
brackets, those in which the busiest process computed, which other work on the machine changes less.
The last lines have the sums of the steps' medians, their ratio, and that of the tokens which the
slowest rank executes.  Nothing is compared here: `megatron-prefix align` does that.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_prefix.lab import runtime
from megatron_prefix.lab.cli import arguments
from megatron_prefix.lab.cli.modelling import add_model, model_options
from megatron_prefix.lab.data.rollouts import Group, read_groups
from megatron_prefix.lab.data.shorten import shorten
from megatron_prefix.lab.rl import loss, passes
from megatron_prefix.lab.rl.job import fit_vocabulary
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify.align import made, of_this_rank
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.schedule import PrefixSchedule

SETTINGS = ("off", "on")
NUMBERS = (
    ("groups", 24, "of a step"),
    ("step-tokens", None, "groups of a step: as many as have so many tokens"),
    ("max-tokens", None, "shorten rollouts"),
    ("warm-up", 0, "steps of the file that are left out"),
    ("steps", 1, "that are timed"),
    ("rounds", 4, "each runs every step with each setting"),
)
"""Options for numbers: name, default, help."""


class Spent(NamedTuple):
    """One call on all ranks.

    Attributes:
        clock: milliseconds of the slowest rank.
        process: milliseconds that the busiest process computed.
        executed, segments: of the ranks.
    """

    clock: float
    process: float
    executed: list[int]
    segments: list[int]


def options() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="of rollouts")
    for name, default, text in NUMBERS:
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    arguments.add_baseline(parser)
    add_model(parser, model="tiny-llama", dtype="float32")
    arguments.add_layout(parser)
    arguments.add_lengths(parser)
    parser.set_defaults(dp=2, deal="length")
    return parser


def timed(schedule: PrefixSchedule, chunks: list[Any], items: Sequence[Any]) -> Spent:
    """One call; all ranks make it."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    dist.barrier()
    clock, process = time.perf_counter(), time.process_time()
    passes.run(schedule, loss.forward_step(loss.GrpoConfig()), chunks, items)
    spent = [1e3 * (time.perf_counter() - clock), 1e3 * (time.process_time() - process)]
    if schedule.report is None:
        raise RuntimeError("the prefix schedule left no report")
    forest = schedule.report.forest
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (*spent, forest.executed_tokens, len(forest.segments)))
    clocks, processes, executed, segments = map(list, zip(*everyone, strict=True))
    return Spent(max(clocks), max(processes), executed, segments)


def run_rank(
    given: argparse.Namespace, layout: Layout, spec: Any, steps: Sequence[Sequence[Group]]
) -> None:
    """One rank's part; the first prints."""
    options, baseline = model_options(given), arguments.baseline_of(given)
    configs = {
        across: arguments.config_of(given, mode="on", across_ranks=across) for across in SETTINGS
    }
    with options.joined(layout):
        chunks, items = options.build(spec, layout), []
        for groups in steps:
            mine, least = of_this_rank(spec, layout, groups, configs["off"], baseline, given.seed)
            items.append(made(mine, baseline, layout.alignment, least, given.seed))
        says = Callbacks(passes_together=True)
        schedules = {across: PrefixSchedule(one, says) for across, one in configs.items()}
        taken: dict[str, list[list[Spent]]] = {across: [] for across in SETTINGS}
        for number in range(given.rounds + 1):
            for across in SETTINGS if number % 2 else SETTINGS[::-1]:
                spent = [timed(schedules[across], chunks, step) for step in items]
                if number:  # the first round is a warm-up
                    taken[across].append(spent)
                    shown = ", ".join(f"{one.clock:.0f} ({one.process:.0f})" for one in spent)
                    say(f"round {number}, {across}: {shown}")
        show(taken)


def show(taken: dict[str, list[list[Spent]]]) -> None:
    """Prints what all rounds took: per setting and round every step."""
    for across, found in taken.items():
        for number, one in enumerate(found[0], start=1):
            say(f"step {number}, {across}: tokens {one.executed}, segments {one.segments}")
    for name in ("clock", "process"):
        off, on = (
            sum(
                statistics.median(getattr(one, name) for one in step)
                for step in zip(*found, strict=True)
            )
            for found in taken.values()
        )
        say(f"{name}: {off:.1f} ms off, {on:.1f} on, {off / on:.3f}x")
    off, on = (sum(max(one.executed) for one in found[0]) for found in taken.values())
    say(f"tokens of the slowest rank: {off:,} off, {on:,} on, {off / on:.3f}x")


def say(text: str) -> None:
    """Prints on the first rank."""
    if runtime.first_rank():
        print(text, flush=True)


def steps_of(given: argparse.Namespace, groups: Iterable[Group]) -> Iterator[list[Group]]:
    """Consecutive steps of so many groups, or of so many tokens or a few more."""
    step: list[Group] = []
    for group in groups:
        kept, _ = shorten(group, given.max_tokens) if given.max_tokens else (group, 0)
        step += [] if kept is None else [kept]
        tokens = sum(len(rollout) for one in step for rollout in one.rollouts)
        if tokens >= given.step_tokens if given.step_tokens else len(step) == given.groups:
            yield step
            step = []


def main() -> None:
    """Times both settings."""
    given = options().parse_args()
    layout = arguments.layout_of(given, runtime.env_world_size())
    cut = steps_of(given, read_groups([given.file]))
    steps = [*itertools.islice(cut, given.warm_up, given.warm_up + given.steps)]
    spec, mapped = fit_vocabulary(model_options(given), [group for one in steps for group in one])
    rest = iter(mapped)
    steps = [[next(rest) for _ in step] for step in steps]
    runtime.launch(run_rank, layout.world_size, given, layout, spec, steps, device=given.device)


if __name__ == "__main__":
    main()
