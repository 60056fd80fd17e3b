"""How often `align` calls right schedules different: python -m benchmarks.false_alarms [--cases N].

Random small models and rollouts in fp64 on one CPU rank (tests/harness/small_cases.py); case n has
seed FIRST + n.  In every `--break-every`-th case each gradient in turn, down to a millionth of the
largest, is multiplied by 1 + 1e-6, which the same judge must notice.
Exit code 1 for a false alarm or a break that is not noticed.
"""

from __future__ import annotations

import argparse
import math
import sys
import time

from megatron_prefix.lab.numerics.compare import Verdict
from tests.harness.one_rank import one_rank
from tests.harness.small_cases import small_case

WRONG = 1 + 1e-6


def used(verdict: Verdict) -> tuple[float, ...]:
    """Losses, log-probs, gradients: the largest difference over its limit."""
    return (
        verdict.loss_max_abs_diff / (verdict.loss_limit or math.inf),
        verdict.logprob_max_abs_diff / (verdict.logprob_limit or math.inf),
        verdict.grad_max_rel_diff / (verdict.tolerance or math.inf),
    )


def main() -> int:
    """Runs the cases and prints what was found; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=1500, metavar="N", help="(default 1500)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="(default 0)")
    parser.add_argument("--break-every", type=int, default=10, metavar="N", help="(default 10)")
    args = parser.parse_args()
    begin, alarms, unnoticed, broken, closest = time.perf_counter(), 0, 0, 0, 0.0
    with one_rank():
        for seed in range(args.first, args.first + args.cases):
            compared = small_case(seed).run()
            verdict = compared.verdict
            closest = max(closest, *used(verdict))
            if not verdict.passed:
                alarms += 1
                print(f"seed {seed}: {verdict.failures[0]}", flush=True)
            if seed % args.break_every == 0:
                broken += 1
                missed = compared.unnoticed(WRONG)
                unnoticed += bool(missed)
                if missed:
                    print(f"seed {seed}: {WRONG} times the gradient of {missed[0]} is not noticed")
    print(
        f"{args.cases} cases, {time.perf_counter() - begin:.0f} s: {alarms} false alarms, largest "
        f"difference {closest:.2f} of its limit; breaks not noticed in {unnoticed} "
        f"of {broken} cases"
    )
    return int(bool(alarms or unnoticed))


if __name__ == "__main__":
    sys.exit(main())
