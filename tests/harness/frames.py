"""Room for Python's frames, which CPython from 3.11 on maps and unmaps piece by piece.

A thread's frames lie in pieces of 16 KiB (`push_chunk` in Python/pystate.c). A stack near the end
of one asks the kernel for memory and gives it back with every call that crosses the end: tens of
thousands of times in a step of ranks, a tenth of their time.
"""

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
