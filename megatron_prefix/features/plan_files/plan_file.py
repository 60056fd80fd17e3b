"""Plans from files: `--prefix-plan FILE` runs one, `show` prints one.  Pure."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from megatron_prefix.errors import UserError
from megatron_prefix.features.plan_files.rules import check_plan
from megatron_prefix.features.plan_files.segments import check_segments
from megatron_prefix.features.plan_files.table import from_csv, segment_cells
from megatron_prefix.plan.actions import Plan
from megatron_prefix.plan.error import PlanError
from megatron_prefix.plan.files import read_text
from megatron_prefix.plan.planner import loss_ready_after
from megatron_prefix.plan.walk import seconds_of, walk
from megatron_prefix.tree import Forest, Segment


def read_plan(path: str) -> Plan:
    """A plan from a file; its segments are checked, its programs not.

    Raises:
        UserError: unreadable, not a plan, or its segments are no forest.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a plan: it is not text in UTF-8") from None
    plan = from_csv(text, path)
    try:
        check_segments(plan.segments)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return plan


class PlanFile:
    """A plan that a user wants to run.

    Args:
        path: a file that `plan --csv` wrote, or one edited by hand.
        memory: see PrefixConfig; it counts where the file says "retain" of every segment.

    Raises:
        UserError: see `read_plan`; the plan cannot run, or `memory` contradicts the file.
    """

    def __init__(self, path: str, memory: str = "retain") -> None:
        self.path, self.plan = path, read_plan(path)
        if self.plan.crosses:
            raise UserError(
                f"{path}: its segments cross data-parallel ranks, and a plan from a file cannot do"
                " that; make one without --across-ranks"
            )
        if self.plan.policies and memory not in ("retain", "auto"):
            raise UserError(
                f"{path}: says what each segment keeps, and so does memory {memory!r}; leave"
                " --memory out"
            )
        self._prove(None)
        self._fits = functools.lru_cache(maxsize=4)(self._check_fit)

    def fitting(
        self, forest: Forest, num_ranks: int, num_chunks: int, microbatch_of: Sequence[int]
    ) -> Plan:
        """The plan, if it is one of this step.

        Args:
            forest: the step's segments.
            num_ranks: pipeline size.
            num_chunks: model chunks a rank.
            microbatch_of: the trainer's microbatch of each rollout.

        Raises:
            UserError: pipeline or segments differ, or the losses come too late.
        """
        self._fits(forest, num_ranks, num_chunks, tuple(microbatch_of))
        return self.plan

    def _check_fit(
        self, forest: Forest, num_ranks: int, num_chunks: int, microbatch_of: tuple[int, ...]
    ) -> None:
        plan = self.plan
        if (plan.num_ranks, plan.num_chunks) != (num_ranks, num_chunks):
            raise UserError(
                f"{self.path}: a plan of {plan.num_ranks} ranks with {plan.num_chunks} model"
                f" chunks each, and the pipeline has {num_ranks} with {num_chunks}; change --pp and"
                " --vpp, or make another plan"
            )
        ours, theirs = (_lines(segments) for segments in (forest.segments, plan.segments))
        for number in range(max(len(ours), len(theirs))):
            in_file, in_step = ("".join(lines[number : number + 1]) for lines in (theirs, ours))
            if in_file != in_step:
                raise UserError(
                    f"{self.path}: segment {number} is {in_file or 'not there'}, in this step it is"
                    f" {in_step or 'not there'}; plan the same rollouts with the same lengths"
                )
        self._prove(loss_ready_after(forest, microbatch_of))

    def _prove(self, ready_after: Sequence[int] | None) -> None:
        try:
            check_plan(self.plan, ready_after)
            walk(self.plan, seconds_of(self.plan))
        except PlanError as error:
            line = str(error).partition("\n")[0]
            raise UserError(f"{self.path}: {line}; `megatron-prefix show` marks it") from None


def _lines(segments: Sequence[Segment]) -> list[str]:
    """The lines of the table of segments, without policies."""
    return [",".join(segment_cells(index, segment)) for index, segment in enumerate(segments)]
