"""Segments and plan of every step of one pipeline.  Pure.

Planning a step takes milliseconds, choosing its chunk length tenths of a second. Results are
cached, as further passes over the same rollouts (log-probs, several epochs) need the same plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_prefix import features
from megatron_prefix.config import LEAST_SEGMENT, SEGMENT_TOKENS, PrefixConfig
from megatron_prefix.plan.actions import ON_DEVICE, Plan, policies
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.joint_forest import JointForest
from megatron_prefix.plan.planner import best_plan
from megatron_prefix.plan.prediction import Prediction
from megatron_prefix.tree import Forest, Pairs, TreeOptions, Tries, find_shared
from megatron_prefix.tree.packing import MicrobatchRows

ALIKE = 0.1
"""Share by which seconds and limit of a step may differ from those of the last one whose lengths
were searched for: it takes the same, as searching takes several times as long as one plan."""
STAYS = 0.15
"""Where lengths are to come again, as something is kept for each, other ones take the place of the
last step's if that is predicted to save this share of a step: forecasts of lengths that have not
run are off by as much (TP4's widths in chunks, benchmarks/LOG.md)."""
FEWEST_SEGMENTS = 4
"""For each rank of a pipeline; where there are fewer, shorter segments are tried. Of p ranks' turns
p - 1 in 4p + p - 1 are waits."""


class Forecast(NamedTuple):
    """What is predicted of a plan.

    Attributes:
        union: the plan on the segments of all ranks that share experts.
        peak, limit: bytes besides weights and gradients, of the rank with most; 0 in a step without
            gradients.
        retains: whether every segment has policy "retain", or another one changes nothing.
    """

    plan: Plan
    union: Plan
    peak: float
    limit: float
    prediction: Prediction
    retains: bool

    @property
    def over(self) -> float:
        """Bytes by which the peak is above the limit."""
        return max(0.0, self.peak - self.limit)

    @property
    def settles(self) -> bool:
        """Whether the search for a plan can stop."""
        return self.retains and not self.over

    def is_like(self, other: Forecast) -> bool:
        """Whether its step is about as large as another."""
        mine, theirs = ((of.limit, *of.prediction[2:]) for of in (self, other))
        pairs = zip(mine, theirs, strict=True)  # limits may be infinite
        near = all(a == b or abs(a - b) <= ALIKE * b for a, b in pairs)
        return near and self.settles == other.settles

    @property
    def order(self) -> tuple[float, float]:
        """The plan with the least is taken: within the limit the fastest, else what is least over
        it."""
        return self.over, self.prediction.prefix_seconds


Tried = tuple[Forecast, int, JointForest]
"""What is predicted of segments, and the most positions in one."""
Find = Callable[[Sequence[Pairs], TreeOptions], Tries]
"""Finds what the rollouts of a step share."""
Judge = Callable[[JointForest, Plan], Forecast]
"""Predicts a plan of a step's segments."""


class StepPlanner:
    """Plans the steps of one pipeline.

    `cost` is in seconds on one rank, for choosing chunk lengths; `joins`: whether the model can run
    a span in the segment of its parent; `align`, `pad_multiple` and `even` are of TreeOptions, the
    others of `best_plan`. `options` has the longest segments that are tried.

    Raises:
        UserError: the user's plan file cannot run.
    """

    def __init__(
        self,
        config: PrefixConfig,
        cost: CostModel,
        align: int,
        num_ranks: int,
        num_chunks: int,
        group_size: int | None,
        pad_multiple: int = 1,
        joins: bool = False,
        even: int = 0,
    ) -> None:
        # A pipeline waits less for short segments, and recomputed segments cannot be joined.
        joins = joins and num_ranks * num_chunks == 1 and config.memory in ("auto", *ON_DEVICE)
        joins = joins and config.min_gain > 0
        joins = joins and not (config.chunk_tokens or config.cache_host_layers or config.plan_file)
        self.options = replace(config.tree_options(align, pad_multiple), joins=joins, even=even)
        self._shape, self._memory = (num_ranks, num_chunks), config.memory
        self._lengths = segment_lengths(config, num_ranks)
        # Longest segments have fewest launches; in a pipeline shorter ones may wait less.
        self._least = len(self._lengths) if config.segment_tokens == "auto" else min(2, num_ranks)
        self._fewest = FEWEST_SEGMENTS * num_ranks if num_ranks > 1 else 0
        self._file = None
        if config.plan_file:
            self._file = features.load(features.PLAN_FILE)(config.plan_file, config.memory)
        # If memory is short, stages run less ahead; a single stage never runs ahead.
        less = (*range(config.run_ahead - 1, 0, -1), 0.5, 0) if num_ranks > 1 else ()
        self._lookaheads = config.run_ahead, *less
        # By kind of step what a search chose: the forecast, the length, whether any are joined; by
        # kind of segments the first plan's forecast, and the number of the least.
        self._searched: dict[tuple[bool, bool], tuple[Forecast, int, bool]] = {}
        self._least_of: dict[tuple[int, bool], tuple[Forecast, int]] = {}
        self._chooser = None
        if config.chunk_tokens == "auto":
            self._chooser = features.load(features.CHUNK_LENGTHS)(
                num_ranks, num_chunks, config.run_ahead, group_size, cost.segment
            )
        best = functools.partial(best_plan, num_ranks=num_ranks, num_chunks=num_chunks)
        self._best = functools.lru_cache(maxsize=16)(functools.partial(best, group_size=group_size))

    def build(
        self,
        rollouts: Sequence[Pairs],
        microbatch_of: Sequence[int],
        judge: Judge | None = None,
        find: Find | None = None,
        *,
        joins: bool = True,
        most: int | None = None,
    ) -> tuple[int, Forest]:
        """The most positions in a segment (0: no limit), and the step's segments. What a search
        has chosen serves for further steps like that one.

        Args:
            rollouts: of the step.
            microbatch_of: the trainer's microbatch of each rollout.
            judge: chooses among lengths of segments, where that is "auto".
            find: default: `find_shared`.
            joins: whether any may be joined.
            most: the longest length that is tried, if there is a choice.
        """
        shared = (find or _find_here)(rollouts, self.options)
        cut = functools.partial(self._cut, shared, rollouts, microbatch_of)
        joins = joins and self.options.joins
        if judge is None or (len(self._lengths) == 1 and not joins):
            length = self.options.segment_tokens
            return length, cut(length, joins)

        def judged(joined: bool, length: int, again: bool = False) -> Tried:
            length = length and max(min(length, most or length), self.options.multiple)
            joint = JointForest.alone(cut(length, joined, again=again), microbatch_of)
            return judge(joint, self.plan(joint)), length, joint

        kind, before = (joins, find is None), None
        if most is None and kind in self._searched:
            last, length, joined = self._searched[kind]
            before = self._fastest([judged(joined, length, again=True)], judge), joined
            if not before[0][0].over and before[0][0].is_like(last):
                return length, before[0][2].forest
        chosen = self._search(judged, judge, joins=joins)
        if before is not None and self._stays(before[0][0], chosen[0][0]):
            chosen = before
        (forecast, length, joint), joined = chosen
        if most is None:
            self._searched[kind] = forecast, length, joined
        return length, joint.forest

    def _stays(self, last: Forecast, best: Forecast) -> bool:
        """Whether the lengths of the last step stay, though others are the best; see STAYS."""
        least = (1 - STAYS) * last.prediction.prefix_seconds
        return self.options.even > 0 and not last.over and best.prediction.prefix_seconds > least

    def _search(
        self, judged: Callable[[bool, int], Tried], judge: Judge, *, joins: bool
    ) -> tuple[Tried, bool]:
        """The fastest of all lengths, and whether any segments may be joined in it."""
        tried: list[Tried] = []
        joined = joins
        # Joined segments wait for nothing, so no other policy would save memory.
        for joined in (True, False) if joins else (False,):
            tried += self._by_length(functools.partial(judged, joined))
            if any(not forecast.over for forecast, *_ in tried):
                break
        return self._fastest(tried, judge), joined

    def _fastest(self, tried: Sequence[Tried], judge: Judge) -> Tried:
        return min([*tried, *self._less_ahead(tried, judge)], key=lambda entry: entry[0].order)

    def _less_ahead(self, tried: Sequence[Tried], judge: Judge) -> Iterator[Tried]:
        """Segments over the limit with stages that run less ahead, which wait more, while they take
        less time than others within it."""
        best = min((entry[0].order for entry in tried), default=(0.0, 0.0))
        for forecast, length, joint in tried:
            plans = self.plans(joint, 1)
            while forecast.over and (0.0, forecast.prediction.prefix_seconds) < best:
                plan = next(plans, None)
                if plan is None:
                    break
                forecast = judge(joint, plan)
                best = min(best, forecast.order)
                yield forecast, length, joint

    def _by_length(self, judged: Callable[[int], Tried]) -> list[Tried]:
        """Tries lengths until one settles the search and fills the pipeline, and then one between
        the longest that settles and the next longer length: two answers of 2,050 positions do not
        fit a segment of 4,096."""
        tried: list[Tried] = []
        for length in self._lengths:
            tried.append(judged(length))
            forecast, _, joint = tried[-1]
            fills = len(joint.forest.segments) >= self._fewest
            if forecast.settles and fills and len(tried) >= self._least:
                break
        settled = max((length for forecast, length, _ in tried if forecast.settles), default=0)
        longer = min((length for _, length, _ in tried if length > settled), default=0)
        if settled and longer and self._chooser is None:  # which takes tenths of a second
            tried.append(judged((settled + longer) // 2))
        return tried

    def build_at(
        self,
        length: int,
        rollouts: Sequence[Pairs],
        microbatch_of: Sequence[int],
        *,
        find: Find | None = None,
        rows: MicrobatchRows | None = None,
        joins: bool = True,
    ) -> Forest:
        """As `build`, in segments of at most `length` positions; `rows`: see `Tries.forest`, only
        without `find`."""
        shared = (find or _find_here)(rollouts, self.options)
        return self._cut(shared, rollouts, microbatch_of, length, joins, rows)

    def _cut(
        self,
        shared: Tries,
        rollouts: Sequence[Pairs],
        microbatch_of: Sequence[int],
        length: int,
        joins: bool,
        rows: MicrobatchRows | None = None,
        *,
        again: bool = False,
    ) -> Forest:
        joins = joins and self.options.joins
        options = replace(self.options, segment_tokens=length, joins=joins)
        if self._chooser is not None and shared.exchanged is None:
            chosen = self._chooser.choose(rollouts, None, options, microbatch_of, again=again)
            options = replace(options, chunk_tokens=chosen)
        return replace(shared, options=options).forest(microbatch_of=microbatch_of, rows=rows)

    def fitting(self, joint: JointForest, judge: Judge) -> Forecast:
        """The least in order of the step's plans; none is made behind a first one that settles the
        search. A step like the last one that was searched takes what was the least there."""
        first = judge(joint, self.plan(joint))
        if first.settles:
            return first
        kind = joint.num_pipelines, bool(joint.union.exchanges)
        last, number = self._least_of.get(kind, (None, 0))
        if last is not None and first.is_like(last):
            again = judge(joint, self.plan(joint, number)) if number else first
            least = min(first, again, key=lambda one: one.order)
            if not least.over:
                return least
        tried = [first, *(judge(joint, plan) for plan in self.plans(joint, 1))]
        number, least = min(enumerate(tried), key=lambda pair: pair[1].order)
        self._least_of[kind] = first, number
        return least

    def plan(self, joint: JointForest, number: int = 0) -> Plan:
        return next(self.plans(joint, number))

    def plans(self, joint: JointForest, first: int = 0) -> Iterator[Plan]:
        """The rank's plans, from number `first` on: the user's if there is one, else the planner's
        best, then those whose stages run less ahead and so hold less.

        Raises:
            UserError: the user's plan is of another step or pipeline.
        """
        # Recomputing runs the layers forward again, so all pipelines must do it together.
        default_policies = policies(joint.union.segments, self._memory)
        overrides: dict[str, Any] = dict(segments=joint.forest.segments, sent=joint.sent)
        if self._file is not None:
            plan = self._file.fitting(joint.forest, *self._shape, joint.microbatch_of)
            yield replace(plan, policies=plan.policies or default_policies, **overrides)
            return
        for lookahead in self._lookaheads[first:]:
            owners = joint.union_microbatch_of
            plan = self._best(joint.union, microbatches=owners, run_ahead=lookahead)
            yield replace(plan, policies=default_policies, **overrides)


def _find_here(rollouts: Sequence[Pairs], options: TreeOptions) -> Tries:
    return find_shared(rollouts, options=options)


def segment_lengths(config: PrefixConfig, num_ranks: int) -> tuple[int, ...]:
    """Most positions in a segment, all that a step may be planned with in a pipeline."""
    number = config.segment_tokens
    if config.plan_file or not number:
        return (0,)
    # A stage holds several at once, of the trainer's microbatches maybe a thousand positions each.
    if isinstance(number, str):
        return (LEAST_SEGMENT, *SEGMENT_TOKENS)[num_ranks == 1 :]
    halves = (number >> by for by in range(1, 4 + (num_ranks > 1)))
    return (number, *(half for half in halves if half >= LEAST_SEGMENT))
