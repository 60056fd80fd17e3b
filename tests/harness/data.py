"""Real rollouts that lie beside the project and are no part of it.

The folder is that of the environment variable MEGATRON_PREFIX_DATA, else `shared/data` beside the
repository. A test that needs a set and does not find it is skipped with that reason.
"""

import os
import subprocess
from pathlib import Path

import pytest

from megatron_prefix.lab.data.rollouts import read_groups

REPOSITORY = Path(__file__).resolve().parents[2]
BUNDLED = REPOSITORY / "megatron_prefix" / "lab" / "data" / "bundled" / "agents.jsonl.gz"


def folder():
    """The folder of the sets; it may be missing."""
    return Path(os.environ.get("MEGATRON_PREFIX_DATA", REPOSITORY.parent / "shared" / "data"))


def files():
    return sorted(folder().glob("*.jsonl.gz"))


def path(name):
    """The file of a set such as "gsm8k"; skips the test where it is missing."""
    found = folder() / f"{name}.jsonl.gz"
    if not found.is_file():
        pytest.skip(
            f"no rollouts {found.name} in {folder()} (MEGATRON_PREFIX_DATA names the folder)"
        )
    return found


def groups(name, num_groups):
    """The first groups of a set; skips the test where the set is missing."""
    stream = read_groups(path(name))
    return [group for group, _ in zip(stream, range(num_groups), strict=False)]


def tracked():
    """Files that git knows, or would take in."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("this is not a git work tree")
    names = (REPOSITORY / name for name in done.stdout.split("\0") if name)
    return [name for name in names if name.is_file()]
