"""Ten thousand random plans, planned and simulated: python -m benchmarks.random_plans [NUMBER].

Trees, pipelines of 1 to 8 ranks with 1 to 4 model chunks each, chunks, microbatches and bounds are
random; every tenth plan is searched for as `best_plan` does.  A deadlock or a violated dependency
ends it with the plan's grid.  Exit code 1 when it takes longer than a minute.
"""

from __future__ import annotations

import random
import sys
import time

from tests.harness.joint_jobs import random_case, run

LIMIT_S = 60.0


def main(number: int) -> int:
    """Runs them and prints the time; returns the exit code."""
    rng = random.Random(0)
    actions, begin, cpu = 0, time.perf_counter(), time.process_time()
    for done in range(number):
        actions += run(random_case(rng), best=done % 10 == 0).num_actions
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    print(f"{number:,} plans, {actions:,} actions: {seconds:.1f} s ({cpu:.1f} s on the CPU)")
    return int(cpu > LIMIT_S * max(1.0, number / 10_000))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 10_000))
