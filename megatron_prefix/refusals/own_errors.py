"""[pure] Errors of this package, which are no reason to end a run in mode "auto"."""

from __future__ import annotations

import functools
import logging
import sys
import traceback
from types import TracebackType

from megatron_prefix.errors import StepOutOfMemory, UserError, named, refused
from megatron_prefix.refusals.table import NO_MEMORY, OWN_ERROR

logger = logging.getLogger(__name__)
_PACKAGE = __name__.partition(".")[0]
_LIBRARIES = {"torch", "numpy", "greenlet", *sys.stdlib_module_names}


def as_refusal(error: Exception) -> UserError:
    """An error as the reason why a step cannot run: a UserError itself, else type and place, with
    the traceback logged once. It holds no frame of the step."""
    if isinstance(error, StepOutOfMemory):
        return refused(NO_MEMORY, str(error).partition("; ")[0].partition("\n")[0])
    if isinstance(error, UserError):
        return error.with_traceback(None)
    _log("".join(traceback.format_exception(error)))
    return refused(OWN_ERROR, _last_own_line(error), named(error))


def softened(error: BaseException | None, mode: str) -> BaseException | None:
    """An error as a refusal; in mode "on", or where it ends the process, as it is."""
    if mode == "on" or not isinstance(error, Exception):
        return error
    return as_refusal(error)


def is_own(error: Exception) -> bool:
    """Whether an error that has come out of a forward step was raised by this package, and not by
    the trainer or the model."""
    packages = [name.partition(".")[0] for name, _ in _frames(error.__traceback__)]
    raising = [package for package in packages if package not in _LIBRARIES]
    return bool(raising) and raising[-1] == _PACKAGE


def _last_own_line(error: Exception) -> str:
    lines = [line for name, line in _frames(error.__traceback__) if name.startswith(_PACKAGE + ".")]
    return lines[-1] if lines else "an unknown place"


def _frames(trace: TracebackType | None) -> list[tuple[str, str]]:
    """Module and line of every frame; the lab's frames are a trainer's."""
    frames = []
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        name = "lab" if name.startswith(f"{_PACKAGE}.lab.") else name
        frames.append((name, f"{name}:{trace.tb_lineno}"))
        trace = trace.tb_next
    return frames


@functools.lru_cache(maxsize=64)  # once for each text
def _log(text: str) -> None:
    logger.warning("an internal error of the prefix schedule:\n%s", text)
