"""Where a step's time goes on a GPU: idle gaps by action, and calls of the host that block.

    python -m benchmarks.step_profile 16384:64:9 --model qwen3-next-80b-a3b --trace step.json \\
        --set num_layers=12 --set num_moe_experts=none --set ffn_hidden_size=5632 \\
        --set vocab_size=32768
    python -m benchmarks.step_profile gsm8k.jsonl.gz --step-tokens 90000 --model qwen3-8b

Of a rollout file a step has the first groups.  Both schedules make some steps, and torch's profiler
watches the last.  An idle gap belongs to the action (A, B or C of a segment) in which the host
launched what ended it.  In a layout of several ranks, e.g. with --cp 2, the first is watched.  On
the CPU, with `--device cpu`, only the host's time is there.  `--functions N` says in which Python
functions the host is during N more steps of ours, without the profiler, in all of its threads.
"""

from __future__ import annotations

import argparse
import collections
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_prefix.lab import runtime
from megatron_prefix.lab.bench.work import GroupShape
from megatron_prefix.lab.cli import arguments
from megatron_prefix.lab.cli.modelling import add_model, model_options
from megatron_prefix.lab.data.rollouts import Group, read_groups
from megatron_prefix.lab.models import presets
from megatron_prefix.lab.rl import loss, passes
from megatron_prefix.lab.runtime import Layout
from megatron_prefix.lab.verify.align import made, of_this_rank, stock_schedule
from megatron_prefix.run.calls import Callbacks
from megatron_prefix.run.execute import executor
from megatron_prefix.run.schedule import PrefixSchedule

BLOCKING = ("Synchronize", "cudaMalloc", "cudaFree", "HostAlloc", "cudaMemcpyAsync")
GAPS, KERNELS, FUNCTIONS = 12, 14, 60
SAMPLES, SAMPLE_SECONDS = "all samples", 5e-4
ACTION = "action "


def timed(step: Callable[[], Any]) -> float:
    """Milliseconds."""
    begin = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - begin)


def watched(step: Callable[[], Any], on_gpu: bool) -> tuple[float, Any]:
    """Milliseconds of one more step, and its profile."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as found:
        spent = timed(step)
    return spent, found


def show(name: str, before: list[float], spent: float, found: Any) -> None:
    """Prints what the host waited for, and where the device had nothing to do."""
    events = found.profiler.kineto_results.events()
    steps = ", ".join(f"{one:.0f}" for one in before)
    print(f"{name}: steps of {steps} ms; {spent:.0f} ms under the profiler")
    blocked = collections.defaultdict(list)
    for e in events:
        if any(part in e.name() for part in BLOCKING):
            blocked[e.name()].append(e.duration_ns())
    for call, times in blocked.items():
        print(f"  {call}: {len(times)} calls, {sum(times) / 1e6:.1f} ms")
    gaps = list(idle_gaps(events))
    by_action = collections.Counter[str]()
    for length, _, action in gaps:
        by_action[action] += length
    print(f"  device idle: {sum(by_action.values()) / 1e6:.1f} ms in {len(gaps)} gaps")
    for action, total in by_action.most_common():
        print(f"    in {action}: {total / 1e6:.1f} ms")
    for length, at, action in sorted(gaps, reverse=True)[:GAPS]:
        print(f"    gap of {length / 1e6:.2f} ms at {at:.1f} ms in {action}")
    for action, kernels in busiest(events).items():
        total = sum(kernels.values())
        print(f"  kernels of {action}: {total / 1e6:.1f} ms")
        for kernel, spent in kernels.most_common(KERNELS):
            print(f"    {spent / 1e6:8.2f} ms  {kernel[:100]}")


def sampled(step: Callable[[], Any], num_steps: int, prints: bool) -> None:
    """Prints the Python functions that the host is in during some steps, in milliseconds a step:
    by themselves, and with all that they call; all ranks make the steps."""
    alone, with_callees = collections.Counter[str](), collections.Counter[str]()
    done, begin = threading.Event(), time.perf_counter()
    sampler = threading.Thread(target=_sample, args=(done, alone, with_callees))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    sampler.start()
    try:
        for _ in range(num_steps):
            step()
    finally:
        done.set()
        sampler.join()
        sys.setswitchinterval(before)
    if not prints:
        return
    spent = 1e3 * (time.perf_counter() - begin) / num_steps
    samples = max(1, with_callees.pop(SAMPLES, 0))
    print(f"functions: {spent:.0f} ms a step, {samples / num_steps:.0f} samples")
    for title, counted in (("by themselves", alone), ("with what they call", with_callees)):
        print(f"  {title}:")
        for where, number in counted.most_common(FUNCTIONS):
            print(f"    {spent * number / samples:8.2f} ms  {where}")


def _sample(
    done: threading.Event, alone: collections.Counter[str], with_callees: collections.Counter[str]
) -> None:
    """Counts where other threads are until `done`; a function once a stack."""
    mine = threading.get_ident()
    while not done.wait(SAMPLE_SECONDS):
        with_callees[SAMPLES] += 1
        for thread, top in sys._current_frames().items():
            if thread == mine:
                continue
            alone[_named(top)] += 1
            stack, frame = {_named(top).partition(" ")[2]}, top.f_back
            while frame is not None:
                stack.add(_named(frame).partition(" ")[2])
                frame = frame.f_back
            with_callees.update(stack)


def _named(frame: Any) -> str:
    path = "/".join(frame.f_code.co_filename.rsplit("/", 3)[1:])
    return f":{frame.f_lineno} {frame.f_code.co_qualname} ({path})"


def busiest(events: Any) -> dict[str, collections.Counter[str]]:
    """Nanoseconds of every kernel, by the action that launched it."""
    actions, launched = actions_of(events), launches(events)
    found: dict[str, collections.Counter[str]] = {}
    for e in events:
        if e.device_type() == DeviceType.CUDA and not e.name().startswith(ACTION):
            action = within(actions, launched.get(e.correlation_id(), e.start_ns()))
            found.setdefault(action, collections.Counter())[e.name()] += e.duration_ns()
    return found


def actions_of(events: Any) -> list[tuple[int, int, str]]:
    """Begin and end of every action on the host, in nanoseconds, and its name."""
    return [
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.name())
        for e in events
        if e.name().startswith(ACTION) and e.device_type() == DeviceType.CPU
    ]


def launches(events: Any) -> dict[int, int]:
    """When the host launched what, in nanoseconds, by its correlation."""
    return {e.correlation_id(): e.start_ns() for e in events if "Launch" in e.name()}


def within(actions: list[tuple[int, int, str]], at: int) -> str:
    """The action of the host at a time."""
    where = [name for start, stop, name in actions if start <= at < stop]
    return where[-1] if where else "no action"


def idle_gaps(events: Any) -> Iterator[tuple[int, float, str]]:
    """Their nanoseconds, milliseconds since the first kernel, and the action that ended them."""
    actions, launched = actions_of(events), launches(events)
    on_device = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.correlation_id())
        for e in events
        if e.device_type() == DeviceType.CUDA and not e.name().startswith(ACTION)
    )
    last = first = on_device[0][0] if on_device else 0
    for begin, end, correlation in on_device:
        if begin > last:
            at = launched.get(correlation, begin)
            yield begin - last, (last - first) / 1e6, within(actions, at)
        last = max(last, end)


def groups_of(given: argparse.Namespace, shapes: int, vocab_size: int, seed: int) -> list[Group]:
    """Of a step: so many of a shape, or the first ones of a file."""
    if not Path(given.work).exists():
        return GroupShape.parse(given.work).groups(shapes, vocab_size, seed)
    found, tokens = list[Group](), 0
    for group in read_groups(given.work):
        found.append(group)
        tokens += sum(len(one.tokens) for one in group.rollouts)
        if tokens >= given.step_tokens:
            break
    return found


def prepared(given: argparse.Namespace, layout: Layout) -> dict[str, Callable[[], None]]:
    """One step of each schedule, both with one model and the same microbatches."""
    options = model_options(given)
    spec = presets.resolve(options.model, **dict(options.overrides))
    spec = spec if spec.vocab_size else spec.with_vocab(64)
    chunks = options.build(spec, layout)
    groups = groups_of(given, layout.dp * layout.pp, spec.vocab_size or 0, options.seed)
    mode = given.prefix_schedule
    baseline, config = arguments.baseline_of(given), arguments.config_of(given, mode=mode)
    mine, least = of_this_rank(spec, layout, groups, config, baseline, options.seed)
    items = made(mine, baseline, layout.alignment, least, options.seed)
    prefix = PrefixSchedule(config, Callbacks(loss.trained))
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None

    def step(schedule: Any) -> None:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        wait()
        passes.run(schedule, loss.forward_step(loss.GrpoConfig()), chunks, items)
        wait()

    schedules = {"stock": stock_schedule(), "prefix": prefix}
    return {name: functools.partial(step, one) for name, one in schedules.items()}


def options() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", help="P:R:n, or a rollout file")
    parser.add_argument("--step-tokens", type=int, default=100_000, help="of a file")
    parser.add_argument("--steps", type=int, default=4, help="before the one that is watched")
    parser.add_argument("--functions", type=int, default=0, help="more steps to say this of")
    text = "auto keeps to the stock schedule's memory, too"
    arguments.add_choice(parser, "--prefix-schedule", text, ("on", "auto"), "on")
    parser.add_argument("--trace", help="write the prefix schedule's step for chrome://tracing")
    arguments.add_baseline(parser)
    add_model(parser, model="tiny-llama", dtype="bfloat16")
    arguments.add_layout(parser)
    arguments.add_lengths(parser)
    return parser


def main() -> None:
    """Profiles one step of both schedules."""
    given = options().parse_args()
    layout = arguments.layout_of(given, runtime.env_world_size())
    runtime.launch(profile_rank, layout.world_size, given, layout, device=given.device)


def profile_rank(given: argparse.Namespace, layout: Layout) -> None:
    """One rank's part; the first prints."""
    # The profiler does not show the executor's NVTX ranges.
    executor._annotated = lambda action: record_function(f"{ACTION}{action}")
    with model_options(given).joined(layout):
        for name, step in prepared(given, layout).items():
            before = [timed(step) for _ in range(given.steps)]
            spent, found = watched(step, given.device == "cuda")
            first, ours = runtime.first_rank(), name == "prefix"
            if first:
                show(name, before, spent, found)
            if first and ours and given.trace:
                found.export_chrome_trace(given.trace)
            if ours and given.functions:
                sampled(step, given.functions, first)


if __name__ == "__main__":
    main()
