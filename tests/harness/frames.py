"""The core of a worker, and room for its frames, which CPython from 3.11 on maps piece by piece.

A thread's frames lie in pieces of 16 KiB (`push_chunk` in Python/pystate.c). A stack near the end
of one asks the kernel for memory and gives it back with every call that crosses the end: tens of
thousands of times in a step of ranks, a tenth of their time.
"""

import contextlib
import os
import types

SLOTS = 40_000
"""Of 8 bytes: a piece is a power of two, here 512 KiB, and 24,000 slots of it are left for what
is called; memory that nobody writes is not there."""


def _call(function, *args, **kwargs):
    return function(*args, **kwargs)


with_room = types.FunctionType(
    _call.__code__.replace(co_stacksize=SLOTS), globals(), "with_room", closure=_call.__closure__
)
"""Calls a function with arguments below a frame that asks for `SLOTS`; processes that are forked
below it have the rest of its piece, too."""


def keep_to_one_core():
    """With two workers a core or more, each of them and all that it starts stays on one core.

    Ranks wake one another thousands of times in a test.  From one core to another that takes twice
    as much of the processor, and so does stopping who sends a message for who gets it (a batch job
    is not stopped so).  Threads and processes that are started later inherit it.
    """
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not (number.isdigit() and hasattr(os, "sched_setaffinity")):
        return
    cores = sorted(os.sched_getaffinity(0))
    if int(os.environ["PYTEST_XDIST_WORKER_COUNT"]) >= 2 * len(cores):
        with contextlib.suppress(OSError):  # it may be forbidden, and is about time only
            os.sched_setaffinity(0, {cores[int(number) % len(cores)]})
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
