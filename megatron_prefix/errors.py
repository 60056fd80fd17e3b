"""Errors that mean "the user can fix this", and a step that failed on another rank."""

from __future__ import annotations


def shown(value: object, limit: int = 48) -> str:
    """`value` on one line, cut to `limit` characters, for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


class UserError(ValueError):
    """Bad usage or bad input.

    The message is one line that names what is wrong (file, row and field for data; the option for
    usage) and how to fix it. The command line prints it on stderr and exits with code 2.
    """


class StepOutOfMemory(UserError):
    """A step does not fit in device memory.

    The first line says what was tried and what to change; a table of what every rank of the
    pipeline was predicted to hold follows. Weights and optimizer are as before the step; gradient
    buffers are not, so zero them before the next one.
    """


class CannotShare(UserError):
    """A step that the stock schedule can run and the prefix schedule cannot.

    Mode "auto" falls back; mode "on" raises it.
    """


class StepFailed(RuntimeError):
    """A step that has failed on another rank; the message has that rank's number and reason."""
