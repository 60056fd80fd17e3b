"""Peaks of memory of every step, mode "auto" beside Megatron's schedule on equal microbatches.

    python -m benchmarks.step_peaks OUT.json -- --model qwen3-8b --set num_layers=12 ... (as of
        `megatron-prefix bench`)
    python -m benchmarks.step_peaks OUT.json -- vision --layers 24 ... (as of
        benchmarks/vision_step.py)

Runs the command, and behind its timed steps both schedules once more, a step at a time: Megatron's,
then a new prefix schedule in mode "auto", whose first step is Megatron's and watched.  A line a
step: which schedule ran, policies of its segments, milliseconds, and peaks in GiB, weights and
gradients included.  The allocator's maximum is reset before every step here, and what the schedule
sees of it is the largest so far, as of a trainer, which never resets it.

Of several ranks the first one's are told: `torchrun --nproc-per-node 2 -m benchmarks.step_peaks
OUT.json --mode on --steps 12 -- --cp 2 ...`.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import vision_step
from megatron_prefix.features.measure import allocator
from megatron_prefix.features.measure.allocator import Peaks
from megatron_prefix.lab.bench import steps
from megatron_prefix.lab.cli.main import main
from megatron_prefix.lab.rl import loss, passes
from megatron_prefix.lab.rl.updates import now
from megatron_prefix.run.execute.memory_control import free_memory
from megatron_prefix.run.schedule import PrefixSchedule

GIB = 2**30
_peaks = allocator.peaks


class _Highest:
    """The largest counters so far, over all resets."""

    def __init__(self) -> None:
        self._allocated = self._reserved = 0.0

    def peaks(self, device: torch.device) -> Peaks:
        """In the place of the core's."""
        found = _peaks(device)
        self._allocated = max(self._allocated, found.allocated)
        self._reserved = max(self._reserved, found.reserved)
        return Peaks(found.used, self._allocated, self._reserved)


def of_graphs(chunks: Sequence[Any]) -> dict[str, Any]:
    """What CUDA graphs hold."""
    graphs = steps.all_graphs(chunks)
    return dict(
        captures=sum(of_chunk.captures for of_chunk in graphs),
        capture_ms=1e3 * sum(of_chunk.captured for of_chunk in graphs),
        graphs=sum(of_chunk.uncounted_bytes for of_chunk in graphs) / GIB,
        arenas=sum(of_chunk.arenas.device_bytes for of_chunk in graphs) / GIB,
        sets=[
            [made.most, made.passes, len(made.made), made.placed_bytes / GIB]
            for of_chunk in graphs
            for made in of_chunk.sets
        ],
    )


def rows(
    run: Any, all_steps: Sequence[Sequence[Any]], schedule: Any, num: int
) -> list[dict[str, Any]]:
    """One a step, of so many."""
    forward_step, found = loss.forward_step(loss.GrpoConfig()), []
    free_memory()
    for number in range(num):
        items = all_steps[number % len(all_steps)]
        for chunk in run._chunks:
            chunk.zero_grad_buffer()
        allocator.peaks(run._device)
        torch.cuda.reset_peak_memory_stats()
        allocations = torch.cuda.memory_stats().get("num_device_alloc", 0)
        begin = now(run._device)
        passes.run(schedule, forward_step, run._chunks, items)
        milliseconds = 1e3 * (now(run._device) - begin)
        held = of_graphs(run._chunks)
        highest = steps.peak_bytes(steps.all_graphs(run._chunks)) / GIB
        reserved = torch.cuda.max_memory_reserved() / GIB
        row = dict(gib=highest, ms=milliseconds, reserved=reserved, **held)
        row["allocations"] = torch.cuda.memory_stats().get("num_device_alloc", 0) - allocations
        if isinstance(schedule, PrefixSchedule):
            report: Any = schedule.report
            policies = collections.Counter(
                report.plan.policy(n) for n, s in enumerate(report.plan.segments) if s.waits
            )
            row |= dict(
                share=report.decision.share, reason=report.decision.reason, inner=dict(policies),
                light=report.plan.policies.count("recompute_act"), retried=report.retried,
                segments=len(report.plan.segments),
                longest=max((s.padded_length for s in report.plan.segments), default=0),
                predicted=report.memory.peak / GIB if report.memory else 0.0,
                limit=min(schedule.memory.limit, 1e15) / GIB, base=report.base_bytes / GIB,
                numbers={
                    str(share): {stage: [*n] for stage, n in stages.items()}
                    for costs in schedule.requests.costs.values()
                    for share, stages in costs.num_bytes.items()
                },
            )  # fmt: skip
        found.append(row)
    return found


def watch(output: Path, num: int, num_stock: int, mode: str) -> None:
    """Puts the steps behind the timed ones of `bench`."""
    timed, found = steps._Run.timed, list[dict[str, Any]]()

    def watched(run: Any, warm_up: Any, all_steps: Any, repeats: int) -> Any:
        ours, schedule = isinstance(run._schedule, PrefixSchedule), run._schedule
        measured = timed(run, warm_up, all_steps, repeats)
        if ours:
            config = replace(schedule.config, mode=mode, min_speedup=0.01)
            schedule = PrefixSchedule(config, looks_first=True)
            torch.cuda.reset_peak_memory_stats()
            allocator.peaks = _Highest().peaks
        try:
            each = rows(run, all_steps, schedule, num if ours else num_stock)
        finally:
            allocator.peaks = _peaks
        found.append(dict(ours=ours, step_ms=measured.step_ms, gib=measured.gib, steps=each))
        if int(os.environ.get("RANK", "0")):
            return measured
        output.write_text(json.dumps(found), encoding="utf-8")
        if ours:
            for number, row in enumerate(each):
                stock = found[-2]["steps"][number % num_stock]
                print(
                    f"step {number} {'ours ' if row['share'] else 'stock'} {row['ms']:7.1f} ms,"
                    f" stock {stock['ms']:7.1f}; {row['gib']:.2f} GiB, stock {stock['gib']:.2f},"
                    f" ratio {row['gib'] / stock['gib']:.3f}; reserved {row['reserved']:.2f},"
                    f" stock {stock['reserved']:.2f}; predicted"
                    f" {row['base'] + row['predicted']:.2f}, limit {row['base'] + row['limit']:.2f}"
                    f" segments {row['segments']} of {row['longest']} {row['inner']}"
                    f" light {row['light']} new blocks {row['allocations']}"
                    f" {row['reason'][:40]}"
                    f" captures {row['captures']} {row['capture_ms']:.0f} ms"
                    f" graphs {row['graphs']:.2f} arenas {row['arenas']:.2f} sets {row['sets']}"
                )
            numbers = each[-1]["numbers"]
            print({k: {s: [round(x) for x in n] for s, n in v.items()} for k, v in numbers.items()})
        return measured

    steps._Run.timed = watched  # type: ignore[method-assign, assignment]


def _main(arguments: list[str]) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, metavar="OUT.json")
    parser.add_argument("--steps", type=int, default=8, help="of each schedule (default 8)")
    text = "of Megatron's (default: as many)"
    parser.add_argument("--stock-steps", type=int, default=None, help=text)
    parser.add_argument("--mode", choices=("auto", "on"), default="auto", help="(default auto)")
    options = parser.parse_args(arguments[:split])
    watch(options.output, options.steps, options.stock_steps or options.steps, options.mode)
    rest = arguments[split + 1 :]
    return vision_step.main(rest[1:]) if rest[:1] == ["vision"] else main(["bench", *rest])


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
