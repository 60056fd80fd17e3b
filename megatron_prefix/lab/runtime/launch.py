"""Starts the ranks of a job on this machine, without torchrun."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megatron_prefix.errors import UserError
from megatron_prefix.lab import platforms
from megatron_prefix.lab.runtime import folders, hosts
from megatron_prefix.lab.runtime.groups import (
    RENDEZVOUS,
    end,
    ends_with_groups,
    env_world_size,
    shutdown,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

GRACE_S = 5.0
"""Seconds that a rank may take to end, after its result or a signal, before it is killed."""
NOTICE_S = 1.0
"""Seconds to look, after a rank's failure, for another that has failed before; and seconds that
ranks have to write their stacks."""


MOST_RANKS = 256
"""Ranks that are started on one machine."""
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a job in order, besides SIGINT."""


STANDING = "megatron_prefix.features.watchdog.watchdog"
"""The logger that says where a step stands (not imported: it needs torch)."""


class RankError(RuntimeError):
    """A rank failed; the message holds its number and its traceback, or how it died."""


class _DiedError(RankError):
    """A rank ended without an answer."""


_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class _Rank(NamedTuple):
    process: Any  # multiprocessing.Process of whichever start method
    results: Connection
    log: Path


def launch(fn: Callable[..., T], world_size: int, *args: Any, device: str = "cpu") -> T:
    """Run `fn(*args)` on every rank of a job of `world_size`, which calls `initialize` itself.

    Under torchrun this process is a rank already, and runs `fn`. So is it in a world of one.
    Otherwise the ranks are started here: forked on the CPU, as they share the imports, spawned
    for CUDA (then `fn` must be importable and `args` must pickle). Rank 0 writes to this process's
    stdout and stderr; what the others write is kept until one of them fails.

    Returns:
        What `fn` returned on rank 0 (under torchrun, on this rank).

    Raises:
        UserError: `fn` raised it on some rank, or torchrun's world has another size.
        RankError: a rank failed otherwise; the others have been ended. Under torchrun: this rank
            has lost another.
    """
    started = env_world_size()
    if started is not None and started != world_size:
        raise UserError(
            f"the job needs {world_size} ranks but was started with {started}; "
            f"use torchrun --nproc-per-node {world_size} (per host) or leave torchrun out"
        )
    if started is not None or world_size == 1:
        return _as_this_rank(fn, args)
    if world_size > MOST_RANKS:
        raise UserError(
            f"the job needs {world_size} ranks, and one machine starts at most {MOST_RANKS}; change"
            " the layout, or start them with torchrun on several machines"
        )
    fork = device == "cpu" and sys.platform == "linux"
    if fork:
        platforms.select(device)
        import torch._dynamo  # noqa: F401  # the optimizer wants it, so every rank would import it
    threads = max(1, (os.cpu_count() or 1) // world_size)
    return run_ranks(
        fn, world_size, args, start_method="fork" if fork else "spawn", threads=threads
    )[0]


def _as_this_rank(fn: Callable[..., T], args: Sequence[Any]) -> T:
    """Run `fn` in this process; an error in communication says where the other ranks are."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun ends its ranks, unless it is killed
        _end_with(os.getppid())
    try:
        return fn(*args)
    except RuntimeError as error:
        said = hosts.loss(int(os.environ.get("RANK", "0")), error)
        if said is None:
            raise
        raise RankError(f"{said}\n{traceback.format_exc()}") from None


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    args: Sequence[Any] = (),
    *,
    start_method: str = "fork",
    threads: int = 1,
    timeout_s: float | None = None,
) -> list[T]:
    """Run `fn(*args)` in `world_size` new processes and return the results by rank.

    The ranks find one another through a file in a folder of their own, so jobs never meet. They
    are not daemons: they may start processes. When one fails, or this process is interrupted, all
    of them are ended.

    Args:
        threads: of torch, in each rank.
        timeout_s: after this many seconds the ranks are ended and RankError is raised, which says
            where each of them was.

    Raises:
        UserError, RankError: as `launch`.
    """
    _refuse_inherited_group()
    with _terminable() as signals, folders.new_folder() as folder:
        ranks: list[_Rank] = []
        try:
            with kept_from_collection(), signals.held():
                for rank in range(world_size):
                    ranks.append(_start(fn, args, rank, world_size, folder, start_method, threads))
            results = _collect(ranks, timeout_s)
        except BaseException:
            with signals.held():
                _end(ranks, at_once=True)
            raise
        with signals.held():
            _end(ranks, at_once=False)
        return results


def _refuse_inherited_group() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        raise RuntimeError("this process is a rank itself; call runtime.shutdown() first")


@contextlib.contextmanager
def kept_from_collection() -> Iterator[None]:
    """Processes that are forked inside never collect what this one had made until then.

    Its garbage may hold a process group, whose destructor waits for threads that no child has.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Signals:
    """Turns signals into SystemExit, or KeyboardInterrupt, but not while ranks start or end: a rank
    that nobody knows yet, or that nobody ends any more, would stay."""

    def __init__(self) -> None:
        self._holds, self._came, self._process = False, 0, os.getpid()

    def came(self, number: int, frame: Any = None) -> None:
        """Handles a signal."""
        if os.getpid() != self._process:  # a rank that has just been forked
            os._exit(128 + number)
        if self._holds:
            self._came = self._came or number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + number)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Signals that come inside are handled behind it."""
        self._holds = True
        try:
            yield
        finally:
            self._holds = False
            if self._came:
                number, self._came = self._came, 0
                self.came(number)


@contextlib.contextmanager
def _terminable() -> Iterator[_Signals]:
    """Lets this process end its ranks first when a signal ends it."""
    signals = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    handlers = {number: signal.getsignal(number) for number in (*ENDING, signal.SIGINT)}
    # nohup ignores SIGHUP, and a shell's background job SIGINT; then so do we.
    left = (signal.SIG_IGN, None)  # None: not Python's, which could not be put back
    before = {n: handler for n, handler in handlers.items() if handler not in left}
    for number in before:
        signal.signal(number, signals.came)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(
    fn: Callable[..., Any],
    args: Sequence[Any],
    rank: int,
    world_size: int,
    folder: Path,
    start_method: str,
    threads: int,
) -> _Rank:
    context = multiprocessing.get_context(start_method)
    reader, writer = context.Pipe(duplex=False)
    log = folder / f"rank{rank}.log"
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        RENDEZVOUS: str(folder / "rendezvous"),
        "OMP_NUM_THREADS": str(threads),
    }
    sys.stdout.flush()
    sys.stderr.flush()
    process = context.Process(  # type: ignore[attr-defined]
        target=_rank_main,
        args=(fn, args, writer, environment, log, threads, os.getpid()),
        name=f"rank{rank}",
        daemon=False,
    )
    process.start()
    writer.close()  # so that the reader sees the end of file when the rank dies
    return _Rank(process, reader, log)


def _rank_main(
    fn: Callable[..., Any],
    args: Sequence[Any],
    results: Connection,
    environment: dict[str, str],
    log: Path,
    threads: int,
    launcher: int,
) -> None:
    """The main function of a rank: runs `fn`, sends ("done", result) or how it failed."""
    _end_with(launcher)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends the ranks
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    os.environ.update(environment)
    if environment["RANK"] != "0":
        _redirect_output(log)
    faulthandler.register(signal.SIGUSR1, open(_stacks(log), "w", encoding="utf-8"))  # noqa: SIM115
    try:
        import torch

        torch.set_num_threads(threads)
        # By value: torch would otherwise share tensors with a process that is about to leave.
        kind, answer = "done", pickle.dumps(fn(*args))
    except UserError as error:
        kind, answer = "user error", pickle.dumps(str(error))
    except BaseException:  # noqa: BLE001  # the parent must know of any failure
        kind, answer = "failed", pickle.dumps(traceback.format_exc())
    results.send((kind, answer))
    results.close()
    if kind == "done":
        shutdown()
    if ends_with_groups():
        end(0)
    sys.stdout.flush()
    sys.stderr.flush()


def _end_with(launcher: int) -> None:
    """Let the kernel kill this rank when its launcher has gone, whatever ended that.

    A stopped rank dies too, and so does one in a call that holds Python's lock (`man prctl`,
    PR_SET_PDEATHSIG).  Without prctl, a thread looks.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != launcher:  # it had gone before
            os._exit(1)
        return

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(NOTICE_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _redirect_output(log: Path) -> None:
    """What a rank writes goes to its log, but for where it stands in a step that takes too long:
    that is worth something only next to the other ranks'."""
    stderr = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    logging.getLogger(STANDING).addHandler(logging.StreamHandler(stderr))
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _collect(ranks: list[_Rank], timeout_s: float | None) -> list[Any]:
    """Wait for every rank's answer; the first failure ends the wait."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    waiting: dict[Any, int] = {rank.results: number for number, rank in enumerate(ranks)}
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(waiting), left)
        if not ready:
            late = sorted(waiting.values())
            places = _places({number: ranks[number] for number in late})
            raise RankError(f"{places}ranks {late} did not finish in {timeout_s} s")
        failures = _answers(ready, waiting, ranks, results)
        if failures:
            raise _cause(failures, waiting, ranks, results) from None
    return [results[number] for number in range(len(ranks))]


def _answers(
    ready: Sequence[Any], waiting: dict[Any, int], ranks: list[_Rank], results: dict[int, Any]
) -> dict[int, UserError | RankError]:
    """Takes in the answers that are there; returns the failures among them, by rank."""
    failures: dict[int, UserError | RankError] = {}
    for connection in ready:
        number = waiting.pop(connection)
        try:
            results[number] = _answer(number, ranks[number])
        except (UserError, RankError) as error:
            failures[number] = error
    return failures


def _cause(
    failures: dict[int, UserError | RankError],
    waiting: dict[Any, int],
    ranks: list[_Rank],
    results: dict[int, Any],
) -> UserError | RankError:
    """The failure to tell. A rank that has lost another may be heard before that other."""
    first, deadline = next(iter(failures.values())), time.monotonic() + NOTICE_S
    while waiting and min(map(_doubt, failures.values())) and time.monotonic() < deadline:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        failures |= _answers(ready, waiting, ranks, results)
    number = min(failures, key=lambda rank: _doubt(failures[rank]))
    cause = failures[number]
    if isinstance(cause, UserError):
        return cause
    text = str(cause) if first is cause else f"{cause}\n{first}"
    return RankError(text + _causes(str(cause), ranks, number))


def _doubt(error: UserError | RankError) -> int:
    """How likely another rank is the cause of a failure; 0: it is not."""
    if isinstance(error, UserError | _DiedError):
        return 0
    return 2 if hosts.LOST.search(str(error).rstrip().rpartition("\n")[2]) else 1


def _answer(number: int, rank: _Rank) -> Any:
    """One rank's result, or its failure raised here."""
    try:
        kind, answer = rank.results.recv()
    except EOFError:
        rank.process.join(GRACE_S)
        raise _DiedError(
            f"rank {number} died with exit code {rank.process.exitcode}{_tail(rank.log)}"
        ) from None
    value = pickle.loads(answer)  # from a process started here
    if kind == "user error":
        raise UserError(value)
    if kind == "failed":
        raise RankError(f"rank {number} failed:\n{value}")
    return value


def _causes(error: str, ranks: list[_Rank], failed: int) -> str:
    """Why a rank may have failed: others that a signal has stopped, or too little time."""
    reasons = [
        f"\nrank {number} is stopped; kill -CONT {rank.process.pid} would have let it go on"
        for number, rank in enumerate(ranks)
        if number != failed and _stopped(rank)
    ]
    if not reasons and "timed out" in error.lower():
        reasons = ["\na rank hangs, or needs longer than --message-timeout-minutes: give more"]
    return "".join(reasons)


def _stopped(rank: _Rank) -> bool:
    """Whether a signal has stopped the rank."""
    try:
        stat = Path(f"/proc/{rank.process.pid}/stat").read_text("utf-8", errors="replace")
    except OSError:  # it has ended, or there is no /proc
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"


def _stacks(log: Path) -> Path:
    """The file to which a rank writes its stacks."""
    return log.with_suffix(".stacks")


def _places(ranks: dict[int, _Rank]) -> str:
    """Stacks of ranks that do not finish; a rank that is still starting is ended."""
    for rank in ranks.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR1)
    wait([rank.process.sentinel for rank in ranks.values()], NOTICE_S)
    stacks = {
        n: _stacks(r.log).read_text("utf-8") for n, r in ranks.items() if _stacks(r.log).exists()
    }
    return "".join(f"rank {number} is here:\n{stack}" for number, stack in stacks.items())


def _tail(log: Path, lines: int = 20) -> str:
    """The last lines a rank wrote, for an error message."""
    if not log.exists():
        return ""
    written = log.read_text("utf-8", errors="replace").splitlines()[-lines:]
    return "; it wrote:\n" + "\n".join(written) if written else ""


def _end(ranks: list[_Rank], *, at_once: bool) -> None:
    """Wait for the ranks to end, or end them; kill those that stay. Returns when none is left."""
    for rank in ranks:
        rank.results.close()
        if at_once:
            rank.process.terminate()
    deadline = time.monotonic() + GRACE_S
    for rank in ranks:
        while rank.process.is_alive() and (left := deadline - time.monotonic()) > 0:
            rank.process.join(min(left, NOTICE_S / 4))
            if at_once:  # again: a process that is just being forked loses signals
                rank.process.terminate()
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.process.close()
