"""Host time that a shared step spends on comparing what its model holds, and its generators.

    python -m benchmarks.model_state --model tiny-llama --layers 48

Before every model call of a step all that the model holds is compared (run/read/model_state.py),
and around every segment the states of generators (run/read/random_numbers.py).  Times are those of
the thread, so that other processes do not count; microbatches are short, so that all is host time.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from typing import Any

from megatron_prefix.config import PrefixConfig
from megatron_prefix.device.modules import modules_of
from megatron_prefix.lab.models.build import build_model
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.run.read.model_state import StateOfSteps
from megatron_prefix.run.read.random_numbers import RandomUse, SegmentRandomUse
from megatron_prefix.run.schedule import PrefixSchedule
from tests.harness import steps
from tests.harness.one_group import items
from tests.harness.one_rank import one_rank

spent: defaultdict[str, float] = defaultdict(float)


def timed(owner: Any, name: str) -> None:
    """Adds up what a method takes."""
    stock = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        begin = time.thread_time()
        try:
            return stock(*args, **kwargs)
        finally:
            spent[owner.__name__] += time.thread_time() - begin

    setattr(owner, name, method)


def main() -> None:
    """Prints a line for every step; the first two walk the model anew."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="tiny-llama", help="(default tiny-llama)")
    parser.add_argument("--layers", type=int, default=48, metavar="N", help="(default 48)")
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="(default 6)")
    args = parser.parse_args()
    timed(StateOfSteps, "swap")
    timed(SegmentRandomUse, "__init__")
    timed(RandomUse, "_read")
    with one_rank():
        shape = resolve(args.model, num_layers=args.layers).with_vocab(64)
        model, data = build_model(shape, wrap_ddp=True)[0], items()
        print(f"{sum(1 for _ in modules_of(model))} modules, {len(data)} microbatches")
        schedule = PrefixSchedule(PrefixConfig(min_gain=0, mode="on", kernel="math"))
        for number in range(args.steps):
            steps.zero_gradients(model)
            spent.clear()
            begin = time.thread_time()
            steps.call(schedule, steps.Contract().step, model, data)
            whole = time.thread_time() - begin
            parts = ", ".join(f"{name} {value * 1e6:.0f} us" for name, value in spent.items())
            share = sum(spent.values()) / whole
            print(f"step {number}: {whole * 1e3:.0f} ms, of these {parts}: {share:.2%}", flush=True)


if __name__ == "__main__":
    main()
