"""Runs rows of tests/cases.py and says what is not as they say.

One run of the stock schedule is compared with as many of ours as follow with the same trainer: rows
that differ in options, mode or what they expect alone stand together.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import megatron.core
import pytest
from packaging.version import Version

from megatron_prefix.lab.plans.forest import max_depth, num_trees
from tests.cases import FAMILIES, LAYOUTS, OPTIONS, Row
from tests.harness.one_rank import one_rank
from tests.harness.ranks import failures, outcomes
from tests.harness.recorded import in_fp64, recording
from tests.mistakes import MISTAKES
from tests.oracle import judge
from tests.oracle.case import Case
from tests.oracle.judge import ENDED, EQUAL, FALLBACK, REFUSED, WRONG
from tests.oracle.trainer import Call

EXPECTED = {
    "equal": EQUAL, "fallback": FALLBACK, "refused": REFUSED, "wrong": WRONG, "ends": ENDED,
}  # fmt: skip


def case_of(row: Row) -> Case:
    return Case(**{"seed": 0, **row.values})


@functools.lru_cache(maxsize=32)
def _stock(case: Case) -> list[Call]:
    return judge.run(case, "stock")


def complaints(row: Row) -> list[str]:
    """What is not as a row says, on this rank; empty: all is."""
    case = case_of(row)
    stock = _stock(replace(case, options="small"))
    with pytest.MonkeyPatch.context() as patch, _graphs(case) as graphs:
        if row.mistake:
            patch.setattr(*MISTAKES[row.mistake])
        ours = judge.run(case, row.mode, stock)
    verdict = judge.judge(case, row.mode, stock, ours)
    if verdict.what != EXPECTED[row.expects]:
        return [f"{verdict.what} instead of {row.expects}: {' '.join(verdict.kinds)} {verdict.why}"]
    if row.expects == "wrong":
        return [f"{kind} is right" for kind in row.says.split() if kind not in verdict.kinds]
    lines = list(_complaints(row, case, ours))
    if graphs is not None and not graphs.replays:
        lines.append("no graph was replayed")
    return lines


@contextlib.contextmanager
def _graphs(case: Case) -> Iterator[Any]:
    """Where a row's options ask for CUDA graphs, those of the CPU."""
    if "graph_tokens" not in OPTIONS[case.options]:
        yield None
        return
    with recording() as graphs, in_fp64():
        yield graphs


def _complaints(row: Row, case: Case, ours: Sequence[Call]) -> Iterator[str]:
    last = ours[-1]
    said = str(last.raised) if last.report is None or last.raised else last.report.decision.reason
    if row.says not in said:
        yield f"says {said!r}, which lacks {row.says!r}"
    shares = row.shares or (True,) * len(ours) * (row.expects == "equal" and not row.is_random)
    for number, (call, shared) in enumerate(zip(ours, shares, strict=bool(row.shares)), 1):
        if call.shared != shared:
            yield f"call {number} is {'not ' * shared}shared: {call.report.decision.reason}"
    if row.expects != "equal":
        return
    wanted = row.ran if row.is_random else ("shared", *row.ran)
    happened = frozenset().union(*(facts(call.report) for call in ours))
    if missing := [name for name in wanted if name not in happened]:
        yield f"without {', '.join(missing)}; there was {', '.join(sorted(happened))}"
    memory = OPTIONS[case.options].get("memory", "auto")
    for plan in (call.report.plan for call in ours if call.kind == "train" and memory != "auto"):
        inner = [n for n, s in enumerate(plan.segments) if s.inner and s.source < 0]
        if others := {plan.policy(number) for number in inner} - {memory}:
            yield f"policies {', '.join(others)} instead of {memory}"
    keeps_all = "cache_host_layers" not in OPTIONS[case.options] and LAYOUTS[case.layout].pp == 1
    for call in ours:
        predicted = call.report.memory
        if keeps_all and predicted is not None and call.kind == "train":
            taken = call.report.cache_bytes
            if predicted.cache_peak != pytest.approx(taken, rel=1e-6):
                yield f"sidecars take {taken} bytes, {predicted.cache_peak} were predicted"


def facts(report: Any) -> frozenset[str]:
    """What there was in a step of ours, by name; "shared": fewer tokens than the trainer has."""
    forest = report.forest
    inner = [segment for segment in forest.segments if segment.inner]
    spans = [span for segment in forest.segments for span in segment.spans]
    joined = [segment for segment in forest.segments if segment.joined >= 0]
    crossed = getattr(report.crossed, "received_tokens", 0)
    is_there = {
        "shared": forest.executed_tokens < forest.raw_tokens or crossed,
        "several trees": num_trees(forest.segments) > 1,
        "loss in prompts": any(segment.scored for segment in inner),
        "short spans": any(span.length < 3 for span in spans),
        "three levels": max_depth(forest) >= 3,
        "spans of many lengths": any(
            len({span.length for span in segment.spans}) > 1 for segment in inner
        ),
        "ends left out": forest.raw_tokens
        > sum(span.length * len(span.rollouts) for span in spans),
        "joined": joined,
        "joined below a prompt": any(segment.parents for segment in joined),
        "sidecar": report.cache_bytes > 0,
        "crossed": crossed,
    }
    return frozenset(name for name, there in is_there.items() if there)


def run(layout: str, rows: Sequence[Row], timeout_s: float = 600.0) -> list[str]:
    """Complaints about rows in a layout, by all of its ranks, which start once; on one rank here. A
    row that raises tells its own story."""

    def compare(row: Row, *_: Any) -> str:
        return "\n".join(complaints(replace(row, values={**row.values, "layout": layout})))

    cases = {str(row): row for row in rows}
    if layout == "one":
        with one_rank():
            found = outcomes(cases, compare)
        told = [[name, *text.splitlines()] for name, text in found.items()]
    else:
        several = failures(LAYOUTS[layout], cases, compare, timeout_s=timeout_s) if cases else ()
        told = [one.split("\n") for one in several]
    return [f"{place} {line}" for place, *lines in told for line in lines]


def check(layout: str, rows: Sequence[Row]) -> None:
    """Fails with all complaints about rows, in a layout."""
    assert (lines := run(layout, [*filter(is_possible, rows)])) == [], "\n".join(lines)


def is_possible(row: Row) -> bool:
    """Whether this release of megatron-core has the row's family."""
    family, release = FAMILIES[row.values["model"]], Version(megatron.core.__version__)
    return release >= Version(family.since) and not (
        family.until and release >= Version(family.until)
    )
