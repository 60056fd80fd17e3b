"""Host time of a step of many short microbatches before its first segment, and of a stock step.

    python -m benchmarks.host_time --microbatches 512 --tokens 1000

The model is tiny, so most of what is measured is the schedule: forward steps that
are suspended and answered, tokens read, tree, plan, inputs and losses, compared with the stock
schedule on the same microbatches.  Both make three steps before they are timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_prefix.config import PrefixConfig
from megatron_prefix.lab import runtime
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.platforms import cpu

VOCAB = 64


def microbatches(num: int, tokens: int) -> list[dict[str, torch.Tensor]]:
    """Groups of eight samples that share three quarters of their tokens."""
    draw = torch.Generator().manual_seed(0)
    found, shared = [], tokens * 3 // 4
    for number in range(num):
        if number % 8 == 0:
            prompt = torch.randint(0, VOCAB, (1, shared), generator=draw)
        answer = torch.randint(0, VOCAB, (1, tokens + 1 - shared), generator=draw)
        row = torch.cat([prompt, answer], dim=1)
        mask = (torch.arange(tokens) >= shared)[None].float()
        found.append({"tokens": row[:, :-1], "labels": row[:, 1:], "mask": mask})
    return found


def forward_step(iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
    """Of a trainer."""
    batch = next(iterator)
    output = model(batch["tokens"], None, None, labels=batch["labels"], loss_mask=batch["mask"])

    def loss_func(nll: torch.Tensor) -> Any:
        return (nll * batch["mask"]).sum(), batch["mask"].sum().int(), {}

    return output, loss_func


def timed(schedule: Callable[..., Any], model: Any, items: list[Any], repeats: int) -> float:
    """Median seconds of a step."""
    times = []
    for _ in range(repeats + 3):
        model.zero_grad_buffer()
        begin = time.perf_counter()
        schedule(
            forward_step_func=forward_step, data_iterator=iter(items), model=model,
            num_microbatches=len(items), seq_length=items[0]["tokens"].shape[1],
            micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[3:])


def _watched(schedule: Any, executor: Any) -> tuple[Callable[..., Any], list[float]]:
    """The schedule, and seconds from its call to its first segment, call by call."""
    begun: list[float] = []
    before: list[float] = []
    run = executor.run

    def marked(*arguments: Any) -> None:
        begun.append(time.perf_counter())
        run(*arguments)

    def called(**arguments: Any) -> Any:
        begin = time.perf_counter()
        found = schedule(**arguments)
        before.append(begun[-1] - begin)
        return found

    executor.run = marked
    return called, before


def main() -> None:
    """Prints milliseconds per microbatch of both schedules, and ours before the first segment."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--microbatches", type=int, default=512, help="(default 512)")
    parser.add_argument("--tokens", type=int, default=1000, help="of each (default 1000)")
    parser.add_argument("--repeats", type=int, default=5, help="steps of each kind (default 5)")
    parser.add_argument("--no-stock", action="store_true", help="only the prefix schedule")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        cpu.enable()
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", "bfloat16") if on_gpu else ("cpu", "float32")
    runtime.initialize(runtime.Layout(), device)
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_prefix.run.execute.executor import Executor
    from megatron_prefix.run.schedule import PrefixSchedule

    spec = resolve("tiny-llama", num_layers=1).with_vocab(VOCAB)
    (model,) = build_model(spec, dtype=dtype, device=device)
    items = microbatches(args.microbatches, args.tokens)
    items = [{name: value.to(device) for name, value in item.items()} for item in items]
    ours = PrefixSchedule(PrefixConfig())
    watched, before = _watched(ours, Executor)
    times = (
        {}
        if args.no_stock
        else {"stock": timed(get_forward_backward_func(), model, items, args.repeats)}
    )
    times["prefix"] = timed(watched, model, items, args.repeats)
    times["prefix, before its first segment"] = statistics.median(before[3:])
    for name, seconds in times.items():
        print(f"{name}: {1e3 * seconds / args.microbatches:.3f} ms a microbatch")
    runtime.shutdown()


if __name__ == "__main__":
    main()
