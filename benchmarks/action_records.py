"""What every action of both schedules takes and holds, as JSON: evidence for models of cost.

    python -m benchmarks.action_records OUT.json -- --model qwen3-8b --set num_layers=12 ... (as of
        `megatron-prefix bench`)

Runs the command, and behind each of its timed steps the step again: `TIMES` times with every action
of the prefix schedule timed, once with the counters of torch's allocator read around each action,
and once around each model call of the stock schedule.  Counters are never reset, as a trainer's
would not be.  Of an action: kind, policy, whether it is inner, waits, features of its work
(plan/cost.py), spans with a parent, seconds of each time, bytes allocated before and behind it, and
the largest so far before and behind it.  One process.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_prefix.device.clock import elapsed, now, wait_for
from megatron_prefix.lab.bench import steps
from megatron_prefix.lab.cli.main import main
from megatron_prefix.lab.rl.step_parts import watching
from megatron_prefix.plan.actions import Action
from megatron_prefix.plan.cost import action_features, stock_work
from megatron_prefix.run.schedule import PrefixSchedule

TIMES = 3


def counters() -> list[int]:
    """Bytes allocated now, most so far, and most reserved so far; the host does not wait."""
    if not torch.cuda.is_available():
        return [0, 0, 0]
    stats = torch.cuda.memory_stats()
    names = "allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.peak"
    return [stats.get(name, 0) for name in names]


class Record:
    """Of one step with the prefix schedule."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[Action, list[float]] = {}
        self.memory: dict[Action, tuple[list[int], list[int]]] = {}
        self._events: list[tuple[Action, Any, Any]] = []

    @contextlib.contextmanager
    def timing(self, action: Action) -> Iterator[None]:
        """Around what an action computes."""
        begin = now(self._device)
        yield
        self._events.append((action, begin, now(self._device)))

    def add_times(self) -> None:
        """Of the step that has just run."""
        wait_for(self._device)
        spent: dict[Action, float] = {}
        for action, begin, end in self._events:
            spent[action] = spent.get(action, 0.0) + elapsed(begin, end)
        for action, seconds in spent.items():
            self.seconds.setdefault(action, []).append(seconds)
        self._events.clear()

    @contextlib.contextmanager
    def counting(self, action: Action) -> Iterator[None]:
        """Around what an action computes."""
        before = counters()
        yield
        self.memory[action] = before, counters()

    def rows(self, plan: Any) -> list[dict[str, Any]]:
        """One an action."""
        rows = []
        for action, (before, after) in self.memory.items():
            segment = plan.segments[action.segment]
            rows.append(
                dict(
                    action=str(action),
                    policy=plan.policy(action.segment),
                    inner=segment.inner,
                    waits=segment.waits,
                    positions=segment.padded_length,
                    read=segment.num_read,
                    below=sum(span.parent is not None for span in segment.spans),
                    spans=len(segment.spans),
                    features=action_features(plan, action, 0).tolist(),
                    seconds=self.seconds.get(action, []),
                    before=before,
                    after=after,
                )
            )
        return rows


def of_prefix(run: Any, items: Sequence[Any]) -> dict[str, Any]:
    """One step of the prefix schedule."""
    schedule, record = run._schedule, Record(run._device)
    with watching(schedule, record.timing):
        for _ in range(TIMES):
            run._call(items)
            record.add_times()
    begun = counters()
    with watching(schedule, record.counting):
        milliseconds = run._call(items)
    report = schedule.report
    return dict(
        share=report.decision.share, reason=report.decision.reason, begun=begun, ended=counters(),
        milliseconds=milliseconds, whole_ms=[run._call(items) for _ in range(TIMES)],
        memory=report.memory._asdict() if hasattr(report.memory, "_asdict") else str(report.memory),
        cache_bytes=report.cache_bytes, limit=schedule.memory.limit,
        times=str(report.times), rows=record.rows(report.plan),
        raw=report.forest.raw_tokens, executed=report.forest.executed_tokens,
        stock_work=list(stock_work(report.forest)),
    )  # fmt: skip


def of_stock(run: Any, items: Sequence[Any]) -> dict[str, Any]:
    """One step of Megatron's schedule."""
    calls: list[dict[str, Any]] = []
    begun: list[list[int]] = []

    def before(module: Any, args: Any, kwargs: Any) -> None:
        begun.append(counters())

    def after(module: Any, args: Any, output: Any) -> None:
        calls.append(dict(before=begun.pop(), after=counters()))

    model = run._chunks[0]
    hooks = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after),
    ]
    start = counters()
    milliseconds = run._call(items)
    for hook in hooks:
        hook.remove()
    positions = [int(item["tokens"].shape[1]) for item in items]
    return dict(
        positions=positions, calls=calls, begun=start, ended=counters(), milliseconds=milliseconds
    )


def watch(output: Path) -> None:
    """Puts the records behind the timed steps of `bench`."""
    timed, found = steps._Run.timed, []

    def watched(run: Any, warm_up: Any, all_steps: Any, repeats: int) -> Any:
        measured = timed(run, warm_up, all_steps, repeats)
        ours = isinstance(run._schedule, PrefixSchedule)
        record = of_prefix if ours else of_stock
        rows = [record(run, items) for items in all_steps]
        found.append(dict(ours=ours, step_ms=measured.step_ms, gib=measured.gib, steps=rows))
        output.write_text(json.dumps(dict(at=time.time(), schedules=found)), encoding="utf-8")
        return measured

    steps._Run.timed = watched  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[2] != "--":
        sys.exit("python -m benchmarks.action_records OUT.json -- ARGUMENTS of bench")
    watch(Path(sys.argv[1]))
    sys.exit(main(["bench", *sys.argv[3:]]))
