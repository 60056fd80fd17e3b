"""Several ranks in a test: a fresh set of forked processes each time."""

import multiprocessing
import traceback

import numpy.ma  # noqa: F401  # np.median wants it; these are imported once, not in every rank
import torch
import torch._dynamo  # the optimizer does

from megatron_prefix.lab import runtime
from megatron_prefix.lab.platforms import cpu
from megatron_prefix.lab.runtime.launch import kept_from_collection

cpu.enable(hide_gpus=True)
torch.set_num_threads(1)


def run_ranks(world_size, fn, *args, timeout_s=240.0):
    """Run `fn(*args)` on `world_size` ranks on the CPU and return what each of them returned.

    `fn` calls `runtime.initialize`. It may be a closure (the ranks are forked), but what it
    returns must pickle. A failing rank ends the set and raises with that rank's traceback.
    """
    return runtime.run_ranks(fn, world_size, args, timeout_s=timeout_s)


def forked(target, *args, daemon=False):
    """A process that runs `target(*args)`; it never collects the garbage of this one."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=target, args=args, daemon=daemon)
    with kept_from_collection():
        process.start()
    return process


def outcomes(cases, compare):
    """What went wrong in each case on this rank, "" for nothing."""
    found = {}
    for name, case in cases.items():
        try:
            found[name] = compare(case) or ""
        except Exception:  # noqa: BLE001  # the case fails, and the next one tells its own story
            found[name] = traceback.format_exc()
    return found


def failures(layout, cases, compare, **options):
    """Runs a job; all that went wrong in any case on any rank."""

    def on_rank():
        runtime.initialize(layout)
        found = outcomes(cases, lambda case: compare(case, layout))
        runtime.shutdown()
        return found

    return [
        f"{name}, rank {rank}:\n{text}"
        for rank, found in enumerate(run_ranks(layout.world_size, on_rank, **options))
        for name, text in found.items() if text
    ]  # fmt: skip


def check_cases(layout, cases, compare):
    """Runs a job, and fails with all that went wrong."""
    found = failures(layout, cases, compare)
    assert not found, "\n".join(found)
