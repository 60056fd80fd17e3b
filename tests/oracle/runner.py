"""Runs cases in processes of their own, so that one that hangs or dies is only a verdict."""

import contextlib
import itertools
import logging
import multiprocessing
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import torch

from megatron_prefix.errors import UserError
from megatron_prefix.lab import runtime
from tests.cases import LAYOUTS
from tests.harness.one_rank import one_rank
from tests.harness.ranks import forked, run_ranks
from tests.oracle import judge
from tests.oracle.case import Case
from tests.oracle.judge import ENDED, EQUAL, FALLBACK, HUNG, INVALID, REFUSED, Verdict

TIME_S = 240.0
"""Seconds after which a case counts as hung."""
CASES = 60
"""Cases of one process: a model in DDP is never freed."""
Verdicts = dict[str, Verdict]


class Job(NamedTuple):
    """A case and the modes to run it in; `more`: those to run it in where one of them does not
    share."""

    case: Case
    modes: tuple[str, ...]
    more: tuple[str, ...] = ()


def verdicts(case: Case, modes: Sequence[str], more: Sequence[str] = ()) -> Verdicts:
    """Of a job of one rank, in this process, which is in `one_rank`."""
    stock = judge.run(case, "stock")

    def judged(some: Sequence[str]) -> Verdicts:
        return {mode: judge.judge(case, mode, stock, judge.run(case, mode, stock)) for mode in some}

    found = judged(modes)
    shared = all(one.what == judge.EQUAL for one in found.values())
    return found if shared else {**found, **judged(more)}


def run(jobs: Iterable[Job], workers: int = 1) -> Iterator[tuple[Job, Verdicts]]:
    """Verdicts of cases, as they come; those on several ranks one by one.

    Raises:
        RuntimeError: a job has no verdict, which says nothing about its case.
    """
    jobs = list(jobs)
    left = Counter(jobs)
    for job, found in _answers(jobs, workers):
        left[job] -= 1
        yield job, found
    if missing := [str(job.case) for job in left.elements()]:
        raise RuntimeError(f"{len(missing)} cases have no verdict: {'; '.join(missing)}")


def _answers(jobs: list[Job], workers: int) -> Iterator[tuple[Job, Verdicts]]:
    for job in jobs:
        if job.case.ranks > 1:
            yield job, _on_ranks(job.case, job.modes)
    yield from _in_workers([job for job in jobs if job.case.ranks == 1], workers)


def _quiet() -> None:
    """Thousands of cases say thousands of times why they fall back."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


# One rank -----------------------------------------------------------------------------------------


def _worker(pipe: Connection) -> None:
    _quiet()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # and fills new memory with NaN
    with one_rank():
        while (job := pipe.recv()) is not None:
            try:
                pipe.send(verdicts(*job))
            except Exception:  # noqa: BLE001  # a mistake of the oracle itself
                text = traceback.format_exc(limit=-3)
                pipe.send({mode: Verdict(INVALID, ("oracle",), text) for mode in job.modes})


class _Process:
    """A worker, and the job that it is at."""

    def __init__(self) -> None:
        self.pipe, other = multiprocessing.Pipe()
        self.process = forked(_worker, other, daemon=True)
        other.close()
        self.job: Job | None = None
        self.done = 0

    def give(self, job: Job) -> None:
        self.job = job
        self.pipe.send(job)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _in_workers(jobs: list[Job], workers: int) -> Iterator[tuple[Job, Verdicts]]:
    left, busy = iter(jobs), []
    try:
        for job in itertools.islice(left, workers):
            busy.append(_Process())
            busy[-1].give(job)
        while busy:
            ready = wait([one.pipe for one in busy], TIME_S)
            finished = [one for one in busy if one.pipe in ready] or busy[:1]
            for one in finished:
                job = one.job
                assert job is not None
                yield job, _answer(one, late=one.pipe not in ready)
                following = next(left, None)
                if following is None or not one.process.is_alive() or one.done >= CASES:
                    one.end()
                    busy.remove(one)
                    if following is not None:
                        busy.append(_Process())
                        busy[-1].give(following)
                else:
                    one.give(following)
    finally:
        for one in busy:
            one.end()


def _answer(one: _Process, *, late: bool) -> Verdicts:
    one.done += 1
    assert one.job is not None
    if not late:
        with contextlib.suppress(EOFError, ConnectionError):
            return one.pipe.recv()
    one.process.kill()
    one.process.join()
    why = f"no answer within {TIME_S:.0f} s" if late else f"died with {one.process.exitcode}"
    return {mode: Verdict(HUNG if late else ENDED, (), why) for mode in one.job.modes}


# Several ranks ------------------------------------------------------------------------------------


def _on_ranks(case: Case, modes: Sequence[str]) -> Verdicts:
    """Of a case on several ranks: modes after one another in the same processes, which start once;
    each in its own where one of them may leave ranks at different places. Mode on, which may stop
    anywhere, is the last."""
    modes = sorted(modes, key=lambda mode: mode == "on")

    def on_rank() -> list[Verdict]:
        _quiet()
        torch.use_deterministic_algorithms(True, warn_only=True)
        runtime.initialize(LAYOUTS[case.layout], message_timeout_minutes=TIME_S / 60)
        stock = judge.run(case, "stock")
        found = []
        for mode in modes:
            found.append(judge.judge(case, mode, stock, judge.run(case, mode, stock)))
            if mode != modes[-1] and found[-1].what not in (EQUAL, FALLBACK):
                raise RuntimeError(f"mode {mode}: {found[-1].what}")
        return found

    try:
        by_rank = run_ranks(case.ranks, on_rank, timeout_s=TIME_S)
    except (runtime.RankError, UserError) as error:
        if len(modes) > 1:
            return {mode: _on_ranks(case, (mode,))[mode] for mode in modes}
        late = "did not finish" in str(error) or "imed out" in str(error)
        last = str(error).strip().splitlines()[-1][:200]
        return {mode: Verdict(HUNG if late else ENDED, (), last) for mode in modes}
    return {mode: _worst(found) for mode, *found in zip(modes, *by_rank, strict=True)}


def _worst(found: Sequence[Verdict]) -> Verdict:
    """The worst verdict of the ranks; refused if one says why it stops."""
    # One rank that refuses ends the job: the others stop with the next message, if not before.
    refused = [one for one in found if one.what == REFUSED]
    for bad in (INVALID, *([] if refused else [judge.WRONG, ENDED])):
        for one in found:
            if one.what == bad:
                return one
    return (refused or found)[0]
