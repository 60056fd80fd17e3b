"""`--chunk-tokens auto`: the chunk length with the shortest simulated step.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.planner import best_plan, make_plan
from megatron_prefix.plan.walk import Cost, seconds_of, walk
from megatron_prefix.tree import Forest, Pairs, TreeOptions, Tries, find_shared

_SHARES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
_LEAST = 128  # shorter chunks cost more overhead than they save
_FINALISTS = 3  # lengths tried with the slower planner, best_plan
MOST_KNOWN = 64
"""Answers that are remembered."""

TOKENS = CostModel.of_flops(1.0, 0.0, 0.0)
"""A token costs 1, and an action some more; without that the shortest chunks always look best."""


@dataclass(eq=False)
class ChunkChooser:
    """Chooses the chunk length of a step, and remembers it for steps of equal shape.

    Tries 0, multiples and fractions of a wave, and fractions of the longest segment. Each is
    planned and played, the best few again with `best_plan`. With one rank there is no waiting, so
    nothing is cut. Arguments are those of `best_plan`; `cost` is of one rank.
    """

    num_ranks: int
    num_chunks: int = 1
    run_ahead: int = 2
    group_size: int | None = None
    cost: Cost = TOKENS.segment
    _known: dict[tuple[Forest, tuple[int, ...]], int] = field(default_factory=dict, init=False)
    _last: dict[int, int] = field(default_factory=dict, init=False)

    def choose(
        self,
        rollouts: Sequence[Pairs],
        groups: Sequence[int] | None,
        options: TreeOptions,
        microbatches: Sequence[int] | None = None,
        *,
        again: bool = False,
    ) -> int:
        """The best of the chunk lengths tried; 0: no chunks.

        Args:
            rollouts, groups: see `tree.build`.
            options: `chunk_tokens` is ignored.
            microbatches: see `planner.loss_ready_after`.
            again: whether the last answer for segments of that length serves.
        """
        if self.num_ranks == 1 or not rollouts:
            return 0
        if again and options.segment_tokens in self._last:
            return self._last[options.segment_tokens]
        microbatch_of = range(len(rollouts)) if microbatches is None else microbatches
        names: dict[int, int] = {}  # microbatches, renumbered from 0
        numbers = tuple(names.setdefault(number, len(names)) for number in microbatch_of)
        shared = find_shared(rollouts, groups, options)
        forest = shared.forest(0, numbers)
        if (forest, numbers) not in self._known:
            if len(self._known) == MOST_KNOWN:
                self._known.clear()
            lengths = {0, *_chunk_lengths(forest, options)}
            self._known[forest, numbers] = self._best(shared, lengths, numbers)
        self._last[options.segment_tokens] = self._known[forest, numbers]
        return self._known[forest, numbers]

    def _best(self, shared: Tries, lengths: set[int], microbatch_of: Sequence[int]) -> int:
        forests = {length: shared.forest(length, microbatch_of) for length in lengths}

        def tried(planner: Callable[..., Plan], chunk_tokens: int) -> tuple[float, int, int]:
            plan = planner(
                forests[chunk_tokens], self.num_ranks, num_chunks=self.num_chunks,
                microbatches=microbatch_of, run_ahead=self.run_ahead, group_size=self.group_size,
            )  # fmt: skip
            return walk(plan, seconds_of(plan, self.cost)), len(plan.segments), chunk_tokens

        first = sorted(tried(make_plan, chunk_tokens) for chunk_tokens in lengths)
        return min(tried(best_plan, chunk_tokens) for *_, chunk_tokens in first[:_FINALISTS])[2]


def _chunk_lengths(forest: Forest, options: TreeOptions) -> set[int]:
    longest = max(span.length for segment in forest.segments for span in segment.spans)
    wave = min(options.segment_tokens or longest, longest)
    lengths = {longest // share for share in _SHARES} | {2 * wave, wave, wave // 2, wave // 4}
    return {n for n in lengths if max(_LEAST, options.boundary) <= n < longest}
