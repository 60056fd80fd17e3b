"""Packages from the registry in folders beside this environment's others: trainers, and MkDocs.

Run as a script it installs what the suite wants, with nothing but an environment's own pip: CI does
so while the other packages are installed.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SUITE = {"verl": HERE, "modelopt": HERE, "megatron": HERE, "mkdocs": HERE.parents[2] / "docs/site"}
"""What tests ask for by default, and the folders of its pins."""
UNREACHABLE = (
    "connection broken", "Failed to establish", "Temporary failure in name resolution",
    "timed out", "Cannot connect to proxy",
)  # fmt: skip


def _skip(reason):
    import pytest  # which is not there yet where this is a script

    pytest.skip(reason)


def installed(name, beside=HERE):
    """The folder with what `name`.txt in `beside` pins; made at the first call.

    Skips the test where pip reaches no registry, or Python is older than the pins are for.
    """
    if sys.version_info < (3, 11):
        _skip(f"the pins of {name}.txt are for Python 3.11 and newer")
    pins = beside / f"{name}.txt"
    digest = hashlib.sha256(pins.read_bytes()).hexdigest()[:12]
    folder = Path(sys.prefix) / "trainers" / f"{name}-{digest}"
    folder.parent.mkdir(exist_ok=True)
    with open(folder.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of tests that want the same at once one installs it
        if not folder.exists():
            _install(name, pins, folder)
    return folder


def ran(module, *words, **environ):
    """A module that has run as a script, with these variables besides."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *words], cwd=HERE.parents[2],
        env={**os.environ, **environ}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def printed(num, module, *words, **environ):
    """So many lines of JSON that it has printed."""
    done = ran(module, *words, **environ)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    assert len(lines) == num, done.stdout[-2000:] + done.stderr[-4000:]
    return list(map(json.loads, lines))


def newer():
    """PYTHONPATH with the newer Megatron-Core."""
    return os.pathsep.join([str(installed("megatron")), *filter(None, sys.path)])


def printed_by_newer(module):
    """The last line of a module's output, run as a script with that."""
    done = ran(module, PYTHONPATH=newer())
    assert not done.returncode, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]


def _install(name, pins, folder):
    part = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps"]
        made = subprocess.run(
            [*command, "--ignore-requires-python", "--target", str(part), "-r", str(pins)],
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        if made.returncode and any(text in made.stderr for text in UNREACHABLE):
            _skip(f"pip does not reach a registry with {name}: {made.stderr[-300:]}")
        assert not made.returncode, made.stderr
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


if __name__ == "__main__":
    for its_name, its_pins in SUITE.items():
        installed(its_name, its_pins)
