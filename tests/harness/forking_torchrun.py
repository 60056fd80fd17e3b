"""torchrun that forks the ranks of one of our packages, and has imported for all of them.

    python -m tests.harness.forking_torchrun ARGUMENTS OF TORCHRUN -m PACKAGE ARGUMENTS

Where every rank is a Python of its own, a node takes three seconds of the processor for each.
"""

import importlib
import sys

from tests.harness.data import REPOSITORY
from tests.harness.fork_server import IMPORTED


def made(folder):
    """An environment's folder with this as its torchrun, for scripts of launch/."""
    command = folder / "bin" / "torchrun"
    command.parent.mkdir(parents=True)
    python = f"PYTHONPATH='{REPOSITORY}' exec '{sys.executable}' -m {__spec__.name}"
    command.write_text(f'#!/bin/sh\n{python} "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    return folder


def main(arguments):
    for module in IMPORTED:
        importlib.import_module(module)
    from torch.distributed import run

    place = arguments.index("-m")
    script = str(REPOSITORY.joinpath(*arguments[place + 1].split("."), "__main__.py"))
    forks = ["--start-method=fork", "--run-path", script]
    run.main([*arguments[:place], *forks, *arguments[place + 2 :]])


if __name__ == "__main__":
    main(sys.argv[1:])
