"""Errors that mean "the user can fix this", what is refused, and a step that failed elsewhere."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

GAP = "…"
"""Stands for a value in the name of a refusal."""
WRONG, NOT_YET = "never supported", "not supported yet"
CANNOT_RUN = "the prefix schedule cannot run this model with "
"""How the message begins of what is refused of a model."""


@dataclass(frozen=True)
class Refusal:
    """Something that the prefix schedule cannot run: a line of refusals/table.py.

    Attributes:
        name: what it is, as a message begins; `GAP` for each value that a message puts in.
        where: where it is met; see `GROUPS` in refusals/table.py.
        kind: `WRONG` if the schedule can never be right with it, `NOT_YET` if it could be made so.
        fix: what to do, and why.
        is_on: of an option: whether a TransformerConfig has it on.
        ends: whether mode "auto" raises it, too, since it shows when the stock schedule can no
            longer take the step or could not run it either.
    """

    name: str
    where: str
    kind: str
    fix: str
    is_on: Callable[[Any], bool] | None = field(default=None, compare=False)
    ends: bool = False

    def given(self, *values: object) -> Reason:
        """This refusal with values in the gaps of its name, and then of its fix.

        Raises:
            ValueError: other than one value for each gap.
        """
        first, *parts = f"{self.name}: {self.fix}".split(GAP)
        pairs = zip(values, parts, strict=True)
        return Reason(self, first + "".join(f"{value}{part}" for value, part in pairs))


class Reason(NamedTuple):
    """A refusal and what it was met with.

    Attributes:
        text: one line: what is in the way, and the fix.
    """

    refusal: Refusal
    text: str

    def error(self, before: str = "") -> UserError:
        """What to raise: a `CannotShare` unless the refusal ends a step in mode "auto", too."""
        error = (UserError if self.refusal.ends else CannotShare)(before + self.text)
        error.refusal = self.refusal
        return error


def refused(refusal: Refusal, *values: object) -> UserError:
    """The error that says a refusal; see `Refusal.given` and `Reason.error`."""
    return refusal.given(*values).error()


def shown(value: object, limit: int = 48) -> str:
    """repr on one line, cut to `limit` characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def named(error: BaseException) -> str:
    """Type and first line of a foreign error."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def listed(names: Iterable[Any], most: int = 3) -> str:
    """The first `most` in order, and how many more there are."""
    names = sorted(names)
    num_more = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {num_more} more" if num_more > 0 else "")


def unexpected(
    function: Callable[..., Any], name: str, names: Iterable[str], config: type | None = None
) -> str:
    """The message of a TypeError for a keyword argument that a function does not have.

    Args:
        names: of its arguments: the message has the nearest.
        config: a dataclass whose fields belong into another argument, `prefix_config`.
    """
    fix = f"known are {', '.join(names := list(names))}"
    if config is not None and name in config.__dataclass_fields__:  # type: ignore[attr-defined]
        fix = f"it is a field of {config.__name__}: prefix_config={config.__name__}({name}=...)"
    elif nearest := difflib.get_close_matches(name, names, 1):
        fix = f"did you mean {nearest[0]}?"
    return f"{function.__qualname__}() got an unexpected keyword argument {name!r}: {fix}"


def keywords(function: Callable[..., Any]) -> list[str]:
    """Names of a function's keyword-only arguments, in their order."""
    arguments = inspect.signature(function).parameters.values()
    return [argument.name for argument in arguments if argument.kind is argument.KEYWORD_ONLY]


MOST_LETTERS = 1000
"""Of a message's first line."""


def bounded(text: str) -> str:
    """A message with the middle of its first line cut to `MOST_LETTERS`; the end has the fix. Later
    lines stay."""
    line, newline, tables = text.partition("\n")
    if len(line) <= MOST_LETTERS:
        return text
    begin, end = MOST_LETTERS * 7 // 10, MOST_LETTERS * 2 // 10
    note = f" … {len(line) - begin - end:,} more characters … "
    return line[:begin] + note + line[-end:] + newline + tables


class UserError(ValueError):
    """Bad usage or bad input.

    The message is one line that names what is wrong (file, row and field for data; the option for
    usage) and how to fix it. The command line prints it on stderr and exits with code 2. It is
    `bounded`, whatever values are in it.

    Attributes:
        refusal: what the prefix schedule cannot run; None if the message is about something else.
        lasts: whether it is in the way of all later steps of its kind, too.
    """

    refusal: Refusal | None = None
    lasts = False

    def __init__(self, message: str = "") -> None:
        super().__init__(bounded(message))


class DataEnded(UserError, StopIteration):
    """The data iterator had fewer microbatches than the step. It is a StopIteration, too, which
    the stock schedule raises."""


class StepOutOfMemory(UserError):
    """A step does not fit in device memory.

    The first line says what was tried and what to change; a table of what every rank of the
    pipeline was predicted to hold follows. Weights and optimizer are as before the step; gradient
    buffers are not, so zero them before the next one.
    """


class CannotShare(UserError):
    """A step that the stock schedule can run and the prefix schedule cannot.

    Mode "on" raises it; gradients are as before the step. Mode "auto" runs the stock schedule and
    logs the message. `Reason.error` makes it.
    """


class StepFailed(RuntimeError):
    """A step that has failed on another rank. The message has that rank's number and its reason;
    look at that rank's log first."""
