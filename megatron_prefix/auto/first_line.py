"""[pure] Bad usage is one line on stderr, however many ranks torchrun has started."""

from __future__ import annotations

import os
import sys
import time

WAIT_S = 5.0
"""Seconds after which a rank takes the error for its own: torchrun ends all ranks of its host as
soon as one has ended, and tells other hosts a little later."""


def first_line(line: str) -> None:
    """Prints a line, on the first rank of those that torchrun has started.

    The others wait to be ended, the first rank of each host for less long; a rank that is not has
    met an error that the first one has not, and prints it, too.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK") != "0":
        time.sleep(WAIT_S if os.environ.get("LOCAL_RANK") == "0" else 2 * WAIT_S)
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
