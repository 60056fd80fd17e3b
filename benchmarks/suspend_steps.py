"""What it costs to suspend a forward step and to resume it: greenlets against threads.

    python -m benchmarks.suspend_steps --steps 512

Threads are tried in a few lines here; the package has greenlets only
(megatron_prefix/run/read/suspend.py).  The steps also launch an operation before and after their
call.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_prefix.lab.platforms import cpu


class Threaded:
    """A forward step on a thread of its own; one of them runs at a time."""

    def __init__(self, function: Callable[[Callable[[], Any]], Any]) -> None:
        self._outside, self._inside = threading.Semaphore(0), threading.Semaphore(0)
        grad = torch.is_grad_enabled()

        def body() -> None:
            with torch.set_grad_enabled(grad):
                self.result = function(self._pause)
            self._outside.release()

        self._thread = threading.Thread(target=body, daemon=True)
        self._thread.start()
        self._outside.acquire()

    def _pause(self) -> Any:
        self._outside.release()
        self._inside.acquire()
        return self._answer

    def resume(self, answer: Any) -> Any:
        """Goes on from the call to the end."""
        self._answer = answer
        self._inside.release()
        self._outside.acquire()
        self._thread.join()
        return self.result


def _work(device: torch.device) -> torch.Tensor:
    return torch.ones(8, device=device) * 2


def by_threads(num: int, device: torch.device) -> float:
    """Seconds for `num` steps, all suspended before the first goes on."""

    def function(pause: Callable[[], Any]) -> Any:
        _work(device)
        return pause(), _work(device)

    begin = time.perf_counter()
    steps = [Threaded(function) for _ in range(num)]
    for step in steps:
        step.resume(1)
    return time.perf_counter() - begin


def by_greenlets(num: int, device: torch.device) -> float:
    """See `by_threads`."""
    from megatron_prefix.run.read import suspend

    def function() -> Any:
        _work(device)
        return suspend.running().pause(None, int), _work(device)  # type: ignore[union-attr]

    begin = time.perf_counter()
    steps = [suspend.SuspendedStep(function, None) for _ in range(num)]
    for step in steps:
        step.start()
    for step in steps:
        step.resume(lambda: 1)
    return time.perf_counter() - begin


def main() -> None:
    """Prints milliseconds a step, the median of some turns of each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=512, help="suspended at once (default 512)")
    parser.add_argument("--turns", type=int, default=5, help="of each kind (default 5)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        cpu.enable()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for kind in (by_greenlets, by_threads):
        kind(args.steps, device)
        times = [kind(args.steps, device) for _ in range(args.turns)]
        print(f"{kind.__name__}: {1e3 * statistics.median(times) / args.steps:.3f} ms a step")


if __name__ == "__main__":
    main()
