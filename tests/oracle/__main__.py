"""python -m tests.oracle: thousands of random trainers by hand.

Examples:
    python -m tests.oracle --seed 12                     # one case, printed whole
    python -m tests.oracle --seed 12 --set draws=loss    # the same, changed
    python -m tests.oracle --count 5000 --out one.jsonl  # goes on where it was stopped
    python -m tests.oracle --count 300 --ranks 2 --out two.jsonl --only layout=dp2
    python -m tests.oracle --summary one.jsonl two.jsonl
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.oracle import known, runner
from tests.oracle.case import AXES, DRAWN_LAYOUTS, Case, alone, draw, settle
from tests.oracle.judge import GOOD, INVALID, Verdict


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 if a case is wrong that no table explains."""
    options = _parser().parse_args(arguments)
    if options.summary:
        rows = [row for name in options.summary for row in _rows(Path(name))]
        return _summarise(rows)
    modes = tuple(options.modes.split(","))
    cases = list(_cases(options))
    out = Path(options.out) if options.out else None
    done = {json.dumps(row["case"]) for row in _rows(out)} if out else set()
    left = [case for case in cases if json.dumps(asdict(case)) not in done]
    rows = []
    jobs = [runner.Job(case, modes) for case in left]
    for number, (job, found) in enumerate(runner.run(jobs, options.workers), 1):
        row = _row(job.case, found, shrink=options.shrink)
        rows.append(row)
        if out:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if len(cases) == 1 or (row["unexplained"] and not options.quiet):
            _show(job.case, found)
        elif sys.stderr.isatty() or number % 100 == 0:
            print(f"{number} of {len(left)}", file=sys.stderr)
    return _summarise(rows if out is None else list(_rows(out)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.oracle", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--seed", type=int, help="run this one only, or begin with it (--count)")
    parser.add_argument("--count", type=int, help="so many seeds (default 1)")
    parser.add_argument("--alone", action="store_true", help="every value of every axis by itself")
    parser.add_argument("--ranks", type=int, choices=DRAWN_LAYOUTS, default=1)
    parser.add_argument("--odd", type=int, help="axes with odd values (default: 1 to 3)")
    parser.add_argument("--modes", default="auto,on,observe")
    parser.add_argument("--only", action="append", default=[], metavar="AXIS=VALUE",
                        help="only seeds whose case has this value")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="AXIS=VALUE",
                        help="change the case of every seed")  # fmt: skip
    parser.add_argument(
        "--shrink", action="store_true", help="find the smallest case of what no table explains"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--out", help="JSON lines of verdicts; cases in it are not run again")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--summary", nargs="+", metavar="FILE", help="only sum these files up")
    return parser


def _cases(options: Any) -> Iterator[Case]:
    only, changes = _pairs(options.only), _pairs(options.set)
    if options.alone:
        found: Iterable[Case] = dict.fromkeys(alone(options.ranks))
    else:
        begin = options.seed or 0
        seeds = range(begin, begin + (options.count or 1))
        found = (draw(seed, options.ranks, options.odd) for seed in seeds)
    for case in found:
        if changes:
            case = settle(replace(case, **changes))
        if all(getattr(case, name) == value for name, value in only.items()):
            yield case


def _pairs(words: list[str]) -> dict[str, str]:
    pairs = dict(word.split("=", 1) for word in words)
    for name, value in pairs.items():
        every = sum(DRAWN_LAYOUTS.values(), ()) if name == "layout" else AXES[name].values
        if value not in every:
            raise SystemExit(f"{name} is {value!r}: give one of {', '.join(every)}")
    return pairs


def _row(case: Case, found: runner.Verdicts, *, shrink: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"case": asdict(case), "unexplained": [], "smallest": {}}
    row["verdicts"] = {mode: verdict._asdict() for mode, verdict in found.items()}
    for mode, verdict in found.items():
        if verdict.what in (*GOOD, INVALID):
            continue
        if known.explanation(case, mode, verdict) is not None:
            continue
        row["unexplained"].append(mode)
        if shrink:
            row["smallest"][mode] = asdict(_smallest(case, mode, verdict))
    return row


def _smallest(case: Case, mode: str, verdict: Verdict) -> Case:
    """The case with as many axes at their simplest as it can have and fail the same way."""
    for name in [*case.changes()][::-1]:
        simpler = case.without(name)
        if simpler == case or len(simpler.changes()) >= len(case.changes()):
            continue
        ((_, found),) = runner.run([runner.Job(simpler, (mode,))])
        if found[mode].what == verdict.what:
            case = simpler
    return case


def _show(case: Case, found: runner.Verdicts) -> None:
    print(case)
    print(f"  {case!r}")
    for mode, verdict in found.items():
        tables = known.explanation(case, mode, verdict) or ""
        print(
            f"  {mode}: {verdict.what} {' '.join(verdict.kinds)} {verdict.why} {tables}", flush=True
        )


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def _summarise(rows: list[dict[str, Any]]) -> int:
    """Counts, and by value of an axis what failed, with the smallest case."""
    counts: Counter[Any] = Counter()
    smallest: dict[Any, list[Case]] = defaultdict(list)
    bad = 0
    for row in rows:
        case = Case(**row["case"])
        bad += bool(row["unexplained"])
        for mode, fields in row["verdicts"].items():
            verdict = Verdict(**{**fields, "kinds": tuple(fields["kinds"])})
            why = known.explanation(case, mode, verdict)
            counts[mode, verdict.what, why or ""] += 1
            if verdict.what not in (*GOOD, INVALID):
                small = Case(**row["smallest"].get(mode, row["case"]))
                key = why or ", ".join(f"{n}={v}" for n, v in small.changes().items())
                smallest[key or "nothing", mode, verdict.what].append(small)
    print(f"{len(rows)} cases")
    for (mode, what, why), number in sorted(counts.items()):
        print(f"  {mode:8} {what:9} {number:6} {why}")
    for (key, mode, what), cases in sorted(smallest.items(), key=lambda x: -len(x[1])):
        least = min(cases, key=lambda case: (len(case.changes()), case.seed))
        print(f"  {len(cases):5} {mode:8} {what:6} {key}   (seed {least.seed}, {least.layout})")
    print(f"{bad} cases that no table explains")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
