"""Segments and plan of every step of one pipeline.  Pure.

Planning a step takes milliseconds, choosing its chunk length tenths of a second. Results are kept:
further passes over the same rollouts (log-probs, several epochs) ask for the same plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron_prefix.config import SEGMENT_TOKENS, PrefixConfig
from megatron_prefix.plan.actions import Plan, policies
from megatron_prefix.plan.chunking import ChunkChooser
from megatron_prefix.plan.cost import CostModel
from megatron_prefix.plan.joint_forest import JointForest
from megatron_prefix.plan.planfile import PlanFile
from megatron_prefix.plan.planner import best_plan
from megatron_prefix.tree import Forest, Pairs, TreeOptions, build

Judge = Callable[[Forest, Sequence[int], Plan], tuple[bool, float]]
"""(segments, microbatch of each rollout, plan) -> (whether it fits in memory, seconds)"""


class StepPlanner:
    """Plans the steps of one pipeline.

    Args:
        config: what the user set.
        cost: seconds on one rank, for choosing chunk lengths.
        align: alignment of segment boundaries.
        num_ranks: pipeline size.
        num_chunks: model chunks a rank.
        group_size: Megatron's microbatch_group_size_per_vp_stage.

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
    ) -> None:
        self._options, self._shape = config.tree_options(align), (num_ranks, num_chunks)
        self._memory = config.memory
        self._segments = SEGMENT_TOKENS if config.segment_tokens == "auto" else ()
        self._file = PlanFile(config.plan_file, config.memory) if config.plan_file else None
        self._chooser: ChunkChooser | None = None
        pipeline: dict[str, Any] = dict(
            num_chunks=num_chunks, run_ahead=config.run_ahead, group_size=group_size
        )
        if config.chunk_tokens == "auto":
            self._chooser = ChunkChooser(num_ranks, cost=cost.segment, **pipeline)
        self._best = functools.lru_cache(maxsize=8)(
            functools.partial(best_plan, num_ranks=num_ranks, **pipeline)
        )

    def build(
        self,
        rollouts: Sequence[Pairs],
        groups: Sequence[int],
        microbatch_of: Sequence[int],
        judge: Judge | None = None,
    ) -> Forest:
        """The step's segments.

        Args:
            rollouts: of the step.
            groups: see `tree.build`.
            microbatch_of: the trainer's microbatch of each rollout.
            judge: chooses among lengths of segments, where that is "auto".
        """
        if not self._segments or judge is None:
            return self._built(rollouts, groups, microbatch_of, self._options)
        found: list[tuple[bool, float, Forest]] = []
        for number in self._segments:
            options = replace(self._options, segment_tokens=max(number, self._options.multiple))
            forest = self._built(rollouts, groups, microbatch_of, options)
            plan = self._best(forest, microbatches=tuple(microbatch_of))
            plan = replace(plan, policies=policies(forest.segments, self._memory))
            fits, seconds = judge(forest, microbatch_of, plan)
            found.append((fits, seconds, forest))
        fitting = [entry for entry in found if entry[0]] or found[:1]
        return min(fitting, key=lambda entry: entry[1])[2]

    def _built(
        self,
        rollouts: Sequence[Pairs],
        groups: Sequence[int],
        microbatch_of: Sequence[int],
        options: TreeOptions,
    ) -> Forest:
        if self._chooser is not None:
            chunk_tokens = self._chooser.choose(rollouts, groups, options, microbatch_of)
            options = replace(options, chunk_tokens=chunk_tokens)
        return build(rollouts, groups, options, microbatch_of)

    def plan(self, joint: JointForest) -> Plan:
        """The rank's plan: the user's, where there is one, else the planner's.

        Args:
            joint: the rank's pipeline, and those that run together with it.

        Raises:
            UserError: the user's plan is of another step or pipeline.
        """
        # Recomputing runs the layers forward again, so all pipelines must do it together.
        kept = policies(joint.union.segments, self._memory)
        if self._file is not None:
            plan = self._file.fitting(joint.forest, *self._shape, joint.microbatch_of)
            kept = plan.policies or kept
        else:
            plan = self._best(joint.union, microbatches=joint.union_microbatch_of)
        return replace(plan, segments=joint.forest.segments, policies=kept)
