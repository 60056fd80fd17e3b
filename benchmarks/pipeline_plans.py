"""Three plans of one step, timed on two ranks: python -m benchmarks.pipeline_plans [--json].

A pipeline of two stages runs flat groups by phases with barriers, by the planner's plan with the
prompts whole, and by the planner's plan with the prompts in chunks. The plans take turns, and their
medians are compared with the simulation, in which the time of an action is fitted to the actions of
a measured step of each plan. Megatron-Core's stock schedule on the same rollouts is timed once
after them. Exit code 1 if the measured order is not the simulated one.

On the CPU the stages share the cores, which should be idle. On two GPUs, NCCL:
    python -m benchmarks.pipeline_plans --device cuda --model llama3-8b --prompt 10240 \
        --response 2048 --rollouts 8 --chunk-tokens 2048
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.barriers import barrier_plan, phase, simulate_with_barriers
from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.plan_files.table import to_csv
from megatron_prefix.lab.data.generate import generate
from megatron_prefix.lab.data.pairs import pairs_of_groups
from megatron_prefix.lab.data.rollouts import Group
from megatron_prefix.lab.models.presets import ModelSpec, resolve
from megatron_prefix.lab.plans.timeline import Timeline, simulate
from megatron_prefix.lab.rl.report_numbers import stopwatch_of, timeline
from megatron_prefix.lab.runtime.layout import Layout
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.walk import Cost
from megatron_prefix.tree import Segment, build

LAYOUT = Layout(pp=2)
VOCAB = 128
STOCK = "stock schedule, nothing shared"
BARRIERS, WHOLE, CHUNKED = NAMES = ("barriers", "prompts whole", "prompts in chunks")


@dataclass(frozen=True)
class Setting:
    """What is run.

    Attributes:
        groups, rollouts: groups of the step and rollouts of each.
        prompt, response: positions shared by a group, and of each rollout's own.
        chunk_tokens: of the chunked plan.
        hidden, layers: of the tiny model.
        repeats: timed steps of each plan.
        device: "cpu" (fp32) or "cuda" (bf16).
        model: a preset instead of the tiny model.
    """

    groups: int = 2
    rollouts: int = 4
    prompt: int = 2048
    response: int = 128
    chunk_tokens: int = 512
    hidden: int = 512
    layers: int = 4
    repeats: int = 5
    device: str = "cpu"
    model: str = ""

    @property
    def spec(self) -> ModelSpec:
        """The model's shape: matrix products dominate."""
        if self.model:
            return resolve(self.model)
        return resolve(
            "tiny-llama", num_layers=self.layers, hidden_size=self.hidden, init_method_std=0.03,
            kv_channels=self.hidden // 4, ffn_hidden_size=3 * self.hidden, vocab_size=VOCAB,
        )  # fmt: skip

    def made(self) -> list[Group]:
        """The rollouts."""
        lengths = self.prompt + 1, self.response
        return list(generate(self.groups, *lengths, self.rollouts, vocab_size=VOCAB))

    def configs(self, plan_file: str) -> dict[str, PrefixConfig]:
        """Of the three plans, one rollout per wave; `plan_file` is the one with barriers."""
        whole = PrefixConfig(segment_tokens=self.response, min_gain=0)
        return {
            BARRIERS: replace(whole, plan_file=plan_file),
            WHOLE: whole,
            CHUNKED: replace(whole, chunk_tokens=self.chunk_tokens),
        }


@dataclass(frozen=True)
class Run:
    """What came of one plan.

    Attributes:
        plan: what ran.
        timeline: a measured step.
        times: of the other steps, seconds.
    """

    plan: Plan
    timeline: Timeline
    times: tuple[float, ...]


# On a rank ----------------------------------------------------------------------------------------


def run_rank(setting: Setting, plan_file: str) -> tuple[dict[str, Run], float]:
    """Runs all plans in turn, and the stock schedule, whose seconds are returned too.

    Every rank returns the same plans and timelines.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_prefix.features.measure.stopwatch import TimedActions
    from megatron_prefix.lab import runtime
    from megatron_prefix.lab.models.build import build_model
    from megatron_prefix.lab.rl.step_parts import with_part
    from megatron_prefix.lab.verify import align
    from megatron_prefix.run.schedule import PrefixSchedule

    runtime.initialize(LAYOUT, setting.device)
    dtype = "bfloat16" if setting.device == "cuda" else "float32"
    chunks = build_model(setting.spec, layout=LAYOUT, dtype=dtype, device=setting.device)
    items = align.microbatches(setting.made(), seed=0)
    configs = setting.configs(plan_file)
    schedules = {name: PrefixSchedule(configs[name]) for name in NAMES}
    measured: dict[str, tuple[Plan, Timeline]] = {}
    for name, schedule in schedules.items():
        # Twice: kernels choose by the shapes that they have met, then make their plans.
        _step(name, schedule, chunks, items)
        _step(name, schedule, chunks, items)
        with with_part(schedule, TimedActions):
            _step(name, schedule, chunks, items)
        report, stopwatch = schedule.report, stopwatch_of(schedule.report)
        if report is None or stopwatch is None:
            raise RuntimeError("a measured step left no times")
        measured[name] = report.plan, timeline(stopwatch, report.plan)
    times: dict[str, list[float]] = {name: [] for name in schedules}
    for _ in range(setting.repeats):
        for name, schedule in schedules.items():
            times[name].append(_step(name, schedule, chunks, items))
    stock = get_forward_backward_func()
    if setting.device == "cuda":  # whose kernels make plans in the first step
        _step(STOCK, stock, chunks, items)
    stock_s = _step(STOCK, stock, chunks, items)
    runtime.shutdown()
    runs = {name: Run(*measured[name], tuple(times[name])) for name in NAMES}
    return runs, stock_s


def _step(name: str, schedule: Any, chunks: list[Any], items: Sequence[Any]) -> float:
    """Seconds of a forward-backward call, from one barrier to another."""
    import torch

    from megatron_prefix.lab.rl import loss, passes
    from megatron_prefix.run import step_run

    for chunk in chunks:
        chunk.zero_grad_buffer()
    with mock.patch.object(
        step_run, "Links", barrier_links if name == BARRIERS else step_run.Links
    ):
        _meet()
        begin = time.perf_counter()
        passes.run(schedule, loss.forward_step(loss.GrpoConfig()), chunks, items)
        _meet()
        seconds = time.perf_counter() - begin
    if torch.distributed.get_rank() == 0:
        print(f"{seconds:8.2f} s  {name}", file=sys.stderr, flush=True)
    return seconds


def _meet() -> None:
    """Wait for this rank's device, then for the other rank."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    torch.distributed.barrier()


def barrier_links(channels: Any, plan: Plan, *arguments: Any, **options: Any) -> Any:
    """Messages of a `barrier_plan`: behind the last action of a phase the ranks wait."""
    import torch.distributed as dist

    from megatron_prefix.run.execute.messages import Links

    phases = [phase(plan, action) for action in plan.programs[channels.rank]]
    behind = [*map(tuple.__ne__, phases, phases[1:]), False]
    # The first messages leave before the first action, then before and behind each.
    ends = iter([False, *(end for is_last in behind for end in (False, is_last))])

    class BarrierLinks(Links):
        def advance(self) -> None:
            super().advance()
            if next(ends):
                dist.barrier()

    return BarrierLinks(channels, plan, *arguments, **options)


# What the simulator says --------------------------------------------------------------------------


def fitted_cost(runs: Sequence[Run], spec: ModelSpec) -> Cost:
    """Milliseconds of an action: its FLOPs at one speed and one overhead, by least squares."""
    unit = cost_of(spec).forward
    flops = CostModel.of_flops(*unit[:3], action_tokens=0.0).segment
    lines = {}
    for kind in "FB":
        points = [
            (flops(run.plan.segments[event.action.segment]), event.end - event.start)
            for run in runs
            for event in run.timeline.events
            if event.action.kind == kind
        ]
        work, times = np.array(points).T
        lines[kind] = np.polyfit(work, times, 1)

    def cost(segment: Segment, kind: str) -> float:
        return float(np.polyval(lines[kind], flops(segment)))

    return cost


def compare(setting: Setting) -> dict[str, Any]:
    """Runs everything; per plan the simulated and the measured time, and whether orders agree."""
    from megatron_prefix.lab import platforms, runtime

    platforms.select(setting.device)
    whole = build(*pairs_of_groups(setting.made()), setting.configs("")[WHOLE].tree_options(1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "barriers.csv"
        path.write_text(to_csv(barrier_plan(whole, LAYOUT.pp)), encoding="utf-8")
        runs, stock = runtime.launch(run_rank, LAYOUT.pp, setting, str(path), device=setting.device)
    cost = fitted_cost(list(runs.values()), setting.spec)
    rows: list[dict[str, Any]] = []
    for name, run in runs.items():
        played = (simulate_with_barriers if name == BARRIERS else simulate)(run.plan, cost=cost)
        rows.append(
            {
                "plan": name,
                "simulated_ms": played.makespan,
                "measured_ms": 1e3 * statistics.median(run.times),
                "fastest_ms": 1e3 * min(run.times),
                "slowest_ms": 1e3 * max(run.times),
                "simulated_bubble": played.bubble_fraction,
                "measured_bubble": run.timeline.bubble_fraction,
            }
        )
    simulated, measured = (
        [row["plan"] for row in sorted(rows, key=lambda row: row[column])]
        for column in ("simulated_ms", "measured_ms")
    )
    return {
        "setting": asdict(setting),
        "plans": rows,
        "orders_agree": simulated == measured,
        "stock_ms": 1e3 * stock,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a Markdown table or JSON; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline_plans", description=__doc__
    )
    for field in fields(Setting):
        name = field.name.replace("_", "-")
        parser.add_argument(f"--{name}", type=type(field.default), default=field.default)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = vars(parser.parse_args(arguments))
    as_json = options.pop("json")
    found = compare(Setting(**options))
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        print(
            "| plan | simulated ms | measured ms (least to most) | bubble, simulated / measured |"
        )
        print("|---|---|---|---|")
        for row in found["plans"]:
            print(
                "| {plan} | {simulated_ms:,.0f} | {measured_ms:,.0f} ({fastest_ms:,.0f} to"
                " {slowest_ms:,.0f}) | {simulated_bubble:.3f} / {measured_bubble:.3f} |".format(
                    **row
                )
            )
        print(f"{STOCK}: {found['stock_ms']:,.0f} ms")
        print(f"measured order {'as' if found['orders_agree'] else 'NOT as'} simulated")
    return 0 if found["orders_agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
