"""Whether tests notice mistakes: python -m benchmarks.mutants [--only NAME] [--list] [--out FILE].

A mutant is the package with one mistake (benchmarks/mutants_table.py). It is made in a temporary
copy of the working tree, never in place, and the tests that should notice it are run there: killed
if one of them fails, survived if all pass, timeout if they do not end. Tests run without it first,
once for each command: a baseline that fails says nothing about mutants.

Examples:
    python -m benchmarks.mutants --list
    python -m benchmarks.mutants --only graphs --out mutants.jsonl   # goes on where it was stopped
    python -m benchmarks.mutants --only own-gdn/rule-not-rebound --json

Exit code 1 if one survives that the table does not explain, if a line of the table fits no longer,
or if tests fail without any.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.mutants_table import MUTANTS, Mutant

REPOSITORY = Path(__file__).resolve().parent.parent
KILLED, SURVIVED, TIMEOUT = "killed", "survived", "timeout"
STALE = "stale"
"""The table's text is not in the file, or not once."""
BROKEN = "broken"
"""The tests fail without the mutant, or cannot be collected with it."""
NOT_RUN = "not run"
"""The tests are skipped here, with or without it."""
_NOT_COLLECTED = (2, 3, 4, 5)
"""pytest's exit codes for that."""
_LINKED = (".triton",)
"""What git ignores and tests use, if it is there."""


class Outcome(NamedTuple):
    """Of one command.

    Attributes:
        what: KILLED, SURVIVED, TIMEOUT, BROKEN or NOT_RUN.
        seconds: that it took.
        line: the last line that it printed, or the first failure.
    """

    what: str
    seconds: float
    line: str


@dataclass
class Copy:
    """A copy of the working tree: what git tracks, and what it does not ignore.

    Attributes:
        root: the folder.
        timeout_s: of one command.
        baselines: outcomes of commands without a mutant.
    """

    root: Path
    timeout_s: float
    baselines: dict[str, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ticks = itertools.count(1)

    def fill(self) -> None:
        """Copies the files."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True).stdout
        for name in filter(None, listed.decode().split("\0")):
            source, place = REPOSITORY / name, self.root / name
            if source.is_file():
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, place)
        for name in _LINKED:
            if (REPOSITORY / name).exists():
                (self.root / name).symlink_to(REPOSITORY / name)

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Inside, the copy has the mistake.

        Raises:
            LookupError: the text is not in the file exactly once.
        """
        path = self.root / mutant.file
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if (count := before.count(mutant.old)) != 1:
            raise LookupError(f"the text is {count} times in {mutant.file}")
        try:
            self._write(path, before.replace(mutant.old, mutant.new))
            yield
        finally:
            self._write(path, before)

    def _write(self, path: Path, text: str) -> None:
        """Python compiles a file again if its time in seconds or its size differs."""
        path.write_text(text, encoding="utf-8")
        at = time.time() + 2 * next(self._ticks)
        os.utime(path, (at, at))

    def baseline(self, tests: str) -> Outcome:
        """The outcome of a command without a mutant."""
        if tests not in self.baselines:
            self.baselines[tests] = self.run(tests)
        return self.baselines[tests]

    def run(self, tests: str) -> Outcome:
        """Runs a file of tests, and options of pytest."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += ["--tb=line", *shlex.split(tests)]
        data = os.environ.get("MEGATRON_PREFIX_DATA", str(REPOSITORY.parent / "shared" / "data"))
        paths = [str(self.root), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **variables, "MEGATRON_PREFIX_DATA": data}
        begin = time.perf_counter()
        code, text = _finished(command, self.root, environment, self.timeout_s)
        seconds = time.perf_counter() - begin
        if code is None:
            return Outcome(TIMEOUT, seconds, f"no end within {self.timeout_s:.0f} s")
        if code == 0:
            what = SURVIVED if re.search(r"\b[1-9]\d* passed", text) else NOT_RUN
        else:
            what = BROKEN if code in _NOT_COLLECTED else KILLED
        return Outcome(what, seconds, _telling_line(text))


def _finished(
    command: Sequence[str], folder: Path, environment: dict[str, str], timeout_s: float
) -> tuple[int | None, str]:
    """Exit code, None if a command does not end in time, and what it has printed; it and all that
    it has started are ended then."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            ["nice", "-n", "10", *command], cwd=folder, env=environment, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read()


def _telling_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR", "E   "))]
    return (failed or lines or [""])[-1 if not failed else 0][:200]


def judged(copy: Copy, mutant: Mutant) -> Outcome:
    """What the tests of a mutant say, one command after another until one fails."""
    try:
        with copy.mutated(mutant):
            pass
    except LookupError as error:
        return Outcome(STALE, 0.0, str(error))
    for tests in mutant.tests:
        before = copy.baseline(tests)
        if before.what != SURVIVED:
            what = NOT_RUN if before.what == NOT_RUN else BROKEN
            return Outcome(what, before.seconds, f"without the mutant: {before.line}")
    seconds = 0.0
    with copy.mutated(mutant):
        for tests in mutant.tests:
            found = copy.run(tests)
            seconds += found.seconds
            if found.what != SURVIVED:
                return found._replace(seconds=seconds)
    return found._replace(seconds=seconds)


def _row(mutant: Mutant, outcome: Outcome) -> dict[str, Any]:
    fields = {"name": mutant.name, "old": mutant.old, "new": mutant.new, "tests": [*mutant.tests]}
    return {**fields, **outcome._asdict(), "why": mutant.why}


def _is_current(mutant: Mutant, row: dict[str, Any]) -> bool:
    """Whether an earlier row is of the same mistake and the same tests."""
    return (row["old"], row["new"], row["tests"]) == (mutant.old, mutant.new, [*mutant.tests])


def is_good(row: dict[str, Any]) -> bool:
    """Whether a row is as it should be: noticed, or explained."""
    return row["what"] in (KILLED, TIMEOUT) or (
        row["what"] in (SURVIVED, NOT_RUN) and bool(row["why"])
    )


def _shown(row: dict[str, Any]) -> str:
    why = f" (explained: {row['why']})" if row["what"] in (SURVIVED, NOT_RUN) and row["why"] else ""
    return f"{row['what']:8} {row['seconds']:6.1f} s  {row['name']}{why}"


def selected(names: Sequence[str]) -> list[Mutant]:
    """Mutants by name, or by the beginning of one up to a slash.

    Raises:
        SystemExit: a name that no mutant has.
    """
    for name in names:
        if not any(name in (one.name, one.area) for one in MUTANTS):
            raise SystemExit(f"--only {name}: no such mutant; see --list")
    return [one for one in MUTANTS if not names or one.name in names or one.area in names]


def main(arguments: list[str] | None = None) -> int:
    """Runs mutants, prints a line for each and a summary; the exit code."""
    options = _parser().parse_args(arguments)
    mutants = selected(options.only)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name}: {mutant.file} ({'; '.join(mutant.tests)})")
        return 0
    out = Path(options.out) if options.out else None
    known = _earlier(out)
    rows = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder), options.timeout)
        copy.fill()
        for mutant in mutants:
            row = known.get(mutant.name)
            if row is None or not _is_current(mutant, row):
                row = _row(mutant, judged(copy, mutant))
                if out:
                    with out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
            rows.append({**row, "why": mutant.why})
            if not options.json:
                print(_shown(rows[-1]), flush=True)
    return _summarised(rows, as_json=options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mutants", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--only", action="append", default=[], metavar="NAME",
                        help="a mutant, or all of an area (graphs); may be repeated")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--json", action="store_true", help="rows as JSON on standard output")
    parser.add_argument("--out", metavar="FILE",
                        help="JSON lines; mutants in it are not run again")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS",
                        help="of one command (default 300)")  # fmt: skip
    return parser


def _earlier(out: Path | None) -> dict[str, dict[str, Any]]:
    if out is None or not out.exists():
        return {}
    rows = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    return {row["name"]: row for row in rows}


def _summarised(rows: list[dict[str, Any]], *, as_json: bool) -> int:
    counts = Counter(row["what"] for row in rows)
    explained = sum(row["what"] == SURVIVED and bool(row["why"]) for row in rows)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        said = ", ".join(f"{number} {what}" for what, number in sorted(counts.items()))
        print(f"{len(rows)} mutants: {said}; {explained} survivors explained")
    bad = [row for row in rows if not is_good(row)]
    for row in bad:
        print(f"{row['what']}: {row['name']}: {row['line']}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
