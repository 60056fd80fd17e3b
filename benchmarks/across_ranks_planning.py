"""Time of planning one data-parallel rank of a job whose prompts cross ranks.

    python benchmarks/across_ranks_planning.py ../shared/data/{rag_musique,gsm8k}.jsonl.gz

Processor time of one core, median of several runs. Rollouts of a file are dealt at random to ranks
of about 100,000 tokens; a file that is too small is repeated with other tokens, and without files
groups are drawn. All ranks are in this process, without messages; times and bytes are those of the
rank that has most to answer: digests of its beginnings (`tell`), questions (`ask`), passing those
of others on (`pass`), answers (`answer`, `return`), what it tells all ranks (`cut`), reading that
of all (`hear`), what ranks have in common (`common`), the forest (`forest`), its plan (`plan`) and
the place of exchanges in it (`crossing`). "sum" leaves out the forest and the plan, which a rank
that shares alone makes as well: "alone" is both of them there.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import pickle
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from megatron_prefix.config import PrefixConfig
from megatron_prefix.features.across.common import beginnings_of, common_spans
from megatron_prefix.features.across.ranges import Inquiry, answered, distances, leaving
from megatron_prefix.features.across.tries import find_below
from megatron_prefix.lab.data.pairs import pairs_of
from megatron_prefix.lab.data.rollouts import read_groups
from megatron_prefix.lab.models.presets import resolve
from megatron_prefix.lab.rl.baseline import PACK_TOKENS, pack_sizes
from megatron_prefix.layers.model import cost_of
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.planner import make_plan, with_crossing
from megatron_prefix.plan.step_planner import StepPlanner
from megatron_prefix.tree import Forest, Pairs, TreeOptions

COST = cost_of(resolve("qwen3-8b"))
STEPS = (
    "tell",
    "ask",
    "pass",
    "answer",
    "return",
    "cut",
    "hear",
    "common",
    "forest",
    "plan",
    "crossing",
)
T = TypeVar("T")


def drawn() -> list[list[Pairs]]:
    """Groups of 8 with prompts of 1,000 tokens, all of which begin with the same 200."""
    draw = np.random.default_rng(1)
    system, groups = draw.integers(0, 150_000, 200), []
    for _ in range(64):
        prompt = np.concatenate([system, draw.integers(0, 150_000, 800)])
        tokens = [np.concatenate([prompt, draw.integers(0, 150_000, 500)]) for _ in range(8)]
        trained = np.arange(1499) >= 999
        groups.append([Pairs(one[:-1], one[1:], trained) for one in tokens])
    return groups


def repeated(groups: Sequence[Sequence[Pairs]]) -> Iterator[Pairs]:
    """Their rollouts, again and again, each time with tokens of its own."""
    for again in itertools.count():
        for rollout in itertools.chain.from_iterable(groups):
            inputs, labels = (one + again * 1_000_000 for one in (rollout.inputs, rollout.labels))
            yield replace(rollout, inputs=inputs, labels=labels)


def dealt(groups: Sequence[Sequence[Pairs]], num_ranks: int, tokens: int) -> list[list[Pairs]]:
    """Ranks of about so many tokens, each with equally many rollouts."""
    some, total = [], 0
    for rollout in repeated(groups):
        some.append(rollout)
        total += len(rollout)
        if total >= num_ranks * tokens:
            break
    random.Random(1).shuffle(some)
    return [some[rank::num_ranks] for rank in range(num_ranks)]


class Clock:
    """Seconds of steps, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def timed(self, name: str, work: Callable[[], T]) -> T:
        """What some work returns."""
        begin = time.process_time()
        found = work()
        self.seconds.setdefault(name, []).append(time.process_time() - begin)
        return found

    def ms(self, name: str) -> float:
        """Median milliseconds."""
        return 1e3 * statistics.median(self.seconds[name])


def packs(rollouts: Sequence[Pairs]) -> list[int]:
    """The microbatch of each rollout."""
    sizes = pack_sizes([*map(len, rollouts)], PACK_TOKENS)
    return [number for number, size in enumerate(sizes) for _ in range(size)]


class Job:
    """All ranks of a job in this process, and what one of them hears and does.

    Args:
        ranks: their rollouts.
        options: see TreeOptions.
        clock: of the rank that has most to answer.

    Attributes:
        rank: that one.
        bytes_heard: of questions, answers, and what all ranks tell, by that rank.
        said: what ranks tell all others, pickled.
    """

    def __init__(
        self, ranks: Sequence[Sequence[Pairs]], options: TreeOptions, clock: Clock
    ) -> None:
        self._clock, self._num, self.bytes_heard = clock, len(ranks), 0
        told = [beginnings_of(rollouts, options)[0] for rollouts in ranks]
        inquiries = [Inquiry(each, rank, self._num) for rank, each in enumerate(told)]
        asked = [inquiry.questions for inquiry in inquiries]
        for_whom = np.concatenate([rows[:, 0] for rows in asked])
        self.rank = int(np.bincount(for_whom, minlength=self._num).argmax())
        clock.timed("ask", lambda: Inquiry(told[self.rank], self.rank, self._num))
        asked = self._delivered(asked, "pass")
        clock.timed("answer", lambda: answered(asked[self.rank]))
        answers = self._delivered([*map(answered, asked)], "return")
        clock.timed("cut", lambda: inquiries[self.rank].shared(answers[self.rank]))
        both = zip(inquiries, answers, strict=True)
        self.said = [pickle.dumps(inquiry.shared(rows)) for inquiry, rows in both]
        self.bytes_heard += sum(map(len, self.said))

    def _delivered(self, rows: list[np.ndarray], name: str) -> list[np.ndarray]:
        """Rows of all ranks, each where it belongs."""
        passed = []
        for distance in distances(self._num):
            parts = [self._parted(each, rank, distance) for rank, each in enumerate(rows)]
            got = parts[self.rank - distance][1]
            passed.append((rows[self.rank], distance, got))
            self.bytes_heard += got.nbytes
            rows = [
                np.concatenate([kept, parts[rank - distance][1]])
                for rank, (kept, _) in enumerate(parts)
            ]
        self._clock.timed(
            name,
            lambda: [
                np.concatenate([self._parted(before, self.rank, distance)[0], got])
                for before, distance, got in passed
            ],
        )
        return rows

    def _parted(self, rows: np.ndarray, rank: int, distance: int) -> tuple[np.ndarray, np.ndarray]:
        """What a rank keeps and what it sends."""
        is_leaving = leaving(rows, rank, self._num, distance)
        return rows[~is_leaving], rows[is_leaving]


def measure(ranks: Sequence[Sequence[Pairs]], repeats: int) -> str:
    """One line of the table: the planning of the rank that has most to answer."""
    planner, clock = StepPlanner(PrefixConfig(), COST, 1, 1, 1, None), Clock()
    options = planner.options
    for _ in range(repeats):
        job = Job(ranks, options, clock)
    rollouts, microbatch_of = ranks[job.rank], packs(ranks[job.rank])
    build = functools.partial(planner.build, rollouts, microbatch_of)
    for _ in range(repeats):
        told = functools.partial(beginnings_of, rollouts, options)
        _, numbers = clock.timed("tell", told)
        heard = clock.timed("hear", lambda: [*map(pickle.loads, job.said)])
        spans = functools.partial(common_spans, heard, job.rank, options)
        common = clock.timed("common", spans)
        find = functools.partial(find_below, beginnings=numbers, common=common)
        _, forest = clock.timed("forest", functools.partial(build, find=find))
        plan = clock.timed("plan", functools.partial(planned, forest, microbatch_of))
        clock.timed("crossing", functools.partial(with_crossing, plan, forest))
        clock.timed("alone", lambda: planned(build()[1], microbatch_of))
    total = sum(clock.ms(name) for name in STEPS if name not in ("forest", "plan"))
    facts = len(rollouts), forest.executed_tokens, forest.received_tokens, len(common.spans)
    times = [*map(clock.ms, STEPS), total, clock.ms("alone")]
    return " | ".join(
        [*map(str, facts), f"{job.bytes_heard / 1e6:.2f}", *(f"{ms:.1f}" for ms in times)]
    )


def planned(forest: Forest, microbatch_of: Sequence[int]) -> Plan:
    """A plan without its exchanges."""
    return make_plan(forest, microbatches=microbatch_of)


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rollouts", nargs="*", metavar="FILE", help="rollout files")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512], metavar="N")
    parser.add_argument("--tokens", type=int, default=100_000, help="of a rank (default 100000)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    args = parser.parse_args()
    sizes = "rollouts, executed, received, common spans, MB heard".split(", ")
    times = [f"{one}, ms" for one in (*STEPS, "sum", "alone")]
    titles = ["rollouts of", "ranks", *sizes, *times]
    print("| " + " | ".join(titles) + " |")
    print("|---" * len(titles) + "|")
    for path in args.rollouts or [None]:
        groups = drawn()
        if path is not None:
            groups = [[pairs_of(one) for one in group.rollouts] for group in read_groups(path)]
        name = "random tokens" if path is None else Path(path).name.partition(".")[0]
        for num in args.ranks:
            row = measure(dealt(groups, num, args.tokens), args.repeats)
            print(f"| {name} | {num} | {row} |", flush=True)


if __name__ == "__main__":
    main()
