"""Which cores of the processor a worker of the suite runs on."""

import contextlib
import os


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
