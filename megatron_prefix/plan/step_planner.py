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
        self._shape = num_ranks, num_chunks
        self._memory = config.memory
        self._lengths = segment_lengths(config)
        # Longest segments have fewest launches; in a pipeline shorter ones may wait less.
        self._least = len(self._lengths) if config.segment_tokens == "auto" else min(2, num_ranks)
        self._fewest = FEWEST_SEGMENTS * num_ranks if num_ranks > 1 else 0
        self._file = None
        if config.plan_file:
            self._file = features.load(features.PLAN_FILE)(config.plan_file, config.memory)
        # If memory is short, stages run less ahead; a single stage never runs ahead.
        self._lookaheads = range(config.run_ahead, -1, -1) if num_ranks > 1 else (config.run_ahead,)
        self._chooser = None
        if config.chunk_tokens == "auto":
            self._chooser = features.load(features.CHUNK_LENGTHS)(
                num_ranks, num_chunks, config.run_ahead, group_size, cost.segment
            )
        pipeline: dict[str, Any] = dict(num_chunks=num_chunks, group_size=group_size)
        self._best = functools.lru_cache(maxsize=16)(
            functools.partial(best_plan, num_ranks=num_ranks, **pipeline)
        )

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
        """The most positions in a segment (0: no limit), and the step's segments.

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
        tried: list[Tried] = []

        def judged(length: int, joined: bool) -> Tried:
            length = length and max(min(length, most or length), self.options.multiple)
            joint = JointForest.alone(cut(length, joined), microbatch_of)
            return judge(joint, self.plan(joint)), length, joint

        # Joined segments wait for nothing, so no other policy would save memory.
        for joined in (True, False) if joins else (False,):
            tried += self._by_length(functools.partial(judged, joined=joined))
            if any(not forecast.over for forecast, *_ in tried):
                break
        if all(forecast.over for forecast, *_ in tried):
            # Shorter segments may wait less than stages that run less ahead.
            tried = [
                (fitting(judge(joint, plan) for plan in self.plans(joint)), length, joint)
                for _, length, joint in tried
            ]
        _, length, joint = min(tried, key=lambda entry: entry[0].order)
        return length, joint.forest

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
    ) -> Forest:
        joins = joins and self.options.joins
        options = replace(self.options, segment_tokens=length, joins=joins)
        if self._chooser is not None and shared.exchanged is None:
            chunk_tokens = self._chooser.choose(rollouts, None, options, microbatch_of)
            options = replace(options, chunk_tokens=chunk_tokens)
        return replace(shared, options=options).forest(microbatch_of=microbatch_of, rows=rows)

    def plan(self, joint: JointForest) -> Plan:
        return next(self.plans(joint))

    def plans(self, joint: JointForest) -> Iterator[Plan]:
        """The rank's plans: the user's if there is one, else the planner's best, then those whose
        stages run less ahead and so hold less.

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
        for lookahead in self._lookaheads:
            owners = joint.union_microbatch_of
            plan = self._best(joint.union, microbatches=owners, run_ahead=lookahead)
            yield replace(plan, policies=default_policies, **overrides)


def _find_here(rollouts: Sequence[Pairs], options: TreeOptions) -> Tries:
    return find_shared(rollouts, options=options)


def fitting(forecasts: Iterator[Forecast]) -> Forecast:
    """The first plan's if it settles the search (no other is made then); else the least in
    order."""
    first = next(forecasts)
    return first if first.settles else min([first, *forecasts], key=lambda forecast: forecast.order)


def segment_lengths(config: PrefixConfig) -> tuple[int, ...]:
    """Most positions in a segment, all that a step may be planned with."""
    number = config.segment_tokens
    if config.plan_file or not number:
        return (0,)
    if isinstance(number, str):
        return SEGMENT_TOKENS
    return (number, *(number // part for part in (2, 4, 8) if number // part >= LEAST_SEGMENT))
